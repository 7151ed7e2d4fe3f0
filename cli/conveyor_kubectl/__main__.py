"""The program `kubectl-conveyor`, which kubectl runs as `kubectl conveyor`."""

import sys

from conveyor_kubectl.command import main

if __name__ == "__main__":
    sys.exit(main())
