"""Products with expensive epilogues on Hopper (compute capability 9.0), written in Gluon."""
