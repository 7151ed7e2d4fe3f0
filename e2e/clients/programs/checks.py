"""Runs the checks of a client, and prints the name of each check that passes.

Each program beside this file has the checks of one client, and is run as `python PROGRAM URL MODEL`. It runs in the
client's own environment, so this file is the only module of the repository that it imports.
"""

import sys
from collections.abc import Callable

URL, MODEL = sys.argv[1:3]
QUESTION = "How do I use the with statement?"


def run(*checks: Callable[[], None]) -> None:
    """Run the checks. The first one that fails ends the program."""
    for check in checks:
        check()
        print(f"passed: {check.__name__}", flush=True)
