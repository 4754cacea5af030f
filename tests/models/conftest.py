"""Two threads: the machine that runs these tests is shared."""

import torch

torch.set_num_threads(2)
