"""`python -m conveyor_local`: the command `conveyor`."""

import sys

from conveyor_local.command import main

if __name__ == "__main__":
    sys.exit(main())
