"""`python -m conveyor_bench objectives`: an objective for the time between two tokens, in five shapes of traffic.

Each shape runs with the objective and with fixed limits: in virtual time, or with --measured on this machine.
"""

import argparse
from collections.abc import Sequence
from functools import partial

from conveyor_bench.objectives import fleet, virtual
from conveyor_bench.objectives.shapes import SHAPES

SECONDS = 100.0


def main(argv: Sequence[str]) -> int:
    """Entry point of the command. Returns 1 if a shape misses (`Comparison.misses`)."""
    parser = argparse.ArgumentParser(prog="python -m conveyor_bench objectives", description=__doc__)
    parser.add_argument("--measured", action="store_true", help="a model of random weights, on one thread")
    parser.add_argument(
        "--seconds", type=float, help="in which the requests of a shape come; default: 100, and 6 with --measured"
    )
    parser.add_argument("--objective-ms", type=float, default=100.0, help="between two tokens, in virtual time")
    parser.add_argument("--fleet", action="store_true", help="several engines with the autoscaler, in virtual time")
    arguments = parser.parse_args(argv)
    if (arguments.seconds is not None and arguments.seconds <= 0) or arguments.objective_ms <= 0:
        parser.error("--seconds and --objective-ms must be above 0")
    say, seconds = partial(print, flush=True), arguments.seconds or SECONDS
    if arguments.fleet:
        for name in SHAPES:
            for limit in (arguments.objective_ms / 1000, None):
                say(fleet.run_fleet(name, seconds, limit).describe())
        return 0
    if arguments.measured:
        from conveyor_bench.objectives import measured  # needs torch, which virtual time does not

        told = measured.measure(arguments.seconds or measured.SECONDS, say)
    else:
        told = virtual.simulate(seconds, arguments.objective_ms / 1000)
    missed = 0
    for comparison in told:
        say(comparison.describe())
        missed += comparison.misses
    return min(1, missed)
