"""`python -m conveyor_bench objectives`: an objective for the time between two tokens, in five shapes of traffic.

Each shape runs with the objective and with fixed limits, in virtual time.
"""

import argparse
from collections.abc import Sequence

from conveyor_bench.objectives import virtual


def main(argv: Sequence[str]) -> int:
    """Entry point of the command. Returns 1 if a shape misses (`Comparison.misses`)."""
    parser = argparse.ArgumentParser(prog="python -m conveyor_bench objectives", description=__doc__)
    parser.add_argument("--seconds", type=float, default=100.0, help="in which the requests of a shape come")
    parser.add_argument("--objective-ms", type=float, default=100.0, help="between two tokens")
    arguments = parser.parse_args(argv)
    if arguments.seconds <= 0 or arguments.objective_ms <= 0:
        parser.error("--seconds and --objective-ms must be above 0")
    missed = 0
    for comparison in virtual.simulate(arguments.seconds, arguments.objective_ms / 1000):
        print(comparison.describe(), flush=True)
        missed += comparison.misses
    return min(1, missed)
