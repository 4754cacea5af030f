"""``python -m fastswin``: the command line from a checkout, where nothing is installed."""

from fastswin.cli.main import main

if __name__ == "__main__":
    main()
