"""`kubectl-conveyor`, which kubectl runs as `kubectl conveyor`. Start reading here."""

import sys

from conveyor_kubectl.command import main

if __name__ == "__main__":
    sys.exit(main())
