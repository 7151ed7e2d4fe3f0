"""Checks of a client: each program beside this one runs its own, `python PROGRAM URL MODEL`, and names those that hold.

They run in the client's own environment, so they share nothing with the repository but this file.
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
