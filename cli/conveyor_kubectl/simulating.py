"""`kubectl conveyor simulate`: parses the flags, runs the simulation, and prints a table or JSON."""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import yaml

from conveyor_api.errors import InvalidResource
from conveyor_api.resource import InferenceService
from conveyor_api.spec import InferenceServiceSpec
from conveyor_insight.simulate.plot import build_svg
from conveyor_insight.simulate.report import build_json, build_table, summarise
from conveyor_insight.simulate.run import Case, Run
from conveyor_insight.simulate.scenarios import PLAIN, build_scenarios
from conveyor_insight.simulate.traces import Trace, burst, diurnal, ramp, read_csv, steady, step
from conveyor_process.kinds import number, seconds, whole_number
from conveyor_process.settings import ValueKind

DESCRIPTION = """Simulate the autoscaler under a load. The simulation uses the HorizontalPodAutoscaler's arithmetic, the
targets and the behavior that the operator sets, gateways with queues, and engines that take time to start. Without
--trace or --csv it runs the scenarios from which Conveyor's defaults were chosen. Each figure is the worst of the
seeds."""
EPILOG = """The unit of load is busy replicas: a load of 1 keeps the batch of one engine full. The running time of a
request is drawn from an exponential distribution and does not depend on how full the batch is. Only the modes None and
Continuous are simulated."""
_LOAD = number(0.001, 1000)
_TRACES = ("steady", "step", "ramp", "burst", "diurnal")


T = TypeVar("T")


def _read(kind: ValueKind[T]) -> Callable[[str], T]:
    """Return the function with which argparse parses a flag of this kind."""

    def parse(text: str) -> T:
        try:
            return kind.parse(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be {kind.must_be}, not {text!r}") from None

    return parse


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--service",
        type=Path,
        metavar="FILE",
        help="InferenceService to simulate (default: default fields, at most 40 replicas)",
    )
    parser.add_argument(
        "--scenario",
        action="append",
        metavar="NAME",
        choices=[case.name for case in build_scenarios()],
        help="run only this scenario; may be repeated: %(choices)s",
    )
    load = parser.add_argument_group("a load of your own")
    load.add_argument("--trace", choices=_TRACES, help="shape of the load")
    load.add_argument(
        "--csv",
        type=Path,
        metavar="FILE",
        help="arrivals: a column `at` in seconds, and optionally `seconds`, how long each request ran",
    )
    load.add_argument(
        "--low", type=_read(_LOAD), default=0.7, help="load before the change, or lowest load (default %(default)s)"
    )
    load.add_argument(
        "--high", type=_read(_LOAD), default=3, help="load after the change, or highest load (default %(default)s)"
    )
    load.add_argument(
        "--at", type=_read(seconds()), default=1800, help="second at which the load changes (default %(default)g)"
    )
    load.add_argument(
        "--length",
        type=_read(seconds(least=1)),
        default=600,
        help="length of the ramp, burst or period, in seconds (default %(default)g)",
    )
    load.add_argument(
        "--seconds", type=_read(seconds(least=15)), default=5400, help="length of the simulation (default %(default)g)"
    )
    pods = parser.add_argument_group("pods under a load of your own")
    pods.add_argument(
        "--start-seconds",
        type=_read(seconds()),
        default=120,
        help="time until a new pod is ready (default %(default)g)",
    )
    pods.add_argument(
        "--request-seconds",
        type=_read(seconds(least=0.001)),
        default=20,
        help="mean running time of a request (default %(default)g)",
    )
    pods.add_argument(
        "--carries",
        type=_read(whole_number(1, 1024)),
        help="requests that the KV cache of an engine holds; default: the whole batch",
    )
    parser.add_argument(
        "--gateways", type=_read(whole_number(1, 1000)), default=2, help="number of gateways (default %(default)s)"
    )
    parser.add_argument(
        "--seeds",
        type=_read(whole_number(1, 1000)),
        default=3,
        help="number of runs of each load (default %(default)s)",
    )
    signal = parser.add_argument_group("a signal that Conveyor does not have")
    signal.add_argument(
        "--depth-age-seconds",
        type=_read(seconds()),
        default=0,
        help="queue depth counts only requests that have waited this long (default %(default)g)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON with every decision instead of the table")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the last load, with the first seed, as an SVG")


def read_service(path: Path) -> InferenceServiceSpec:
    """Read an InferenceService from a file. Raises ValueError if it cannot be simulated."""
    try:
        service = InferenceService.parse(yaml.safe_load(path.read_text(encoding="utf-8")), known_only=True)
    except (InvalidResource, yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from None
    spec = service.settled_spec
    if spec.autoscaling is None:
        raise ValueError(f"{path}: spec.autoscaling is not set, so the replicas never change")
    if spec.autoscaling.is_external:
        raise ValueError(f"{path}: autoscaling.provider is External, so the autoscaler is not known")
    if spec.batching.window_seconds:
        raise ValueError(f"{path}: only the modes None and Continuous are simulated, not {spec.batching.mode}")
    return spec


def build_trace(flags: argparse.Namespace) -> Trace:
    """Build the load from the flags. Raises ValueError for an invalid file of arrivals."""
    if flags.csv is not None:
        with flags.csv.open(encoding="utf-8-sig", newline="") as lines:
            return read_csv(lines)
    low, high, at, length, total = flags.low, flags.high, flags.at, flags.length, flags.seconds
    match flags.trace:
        case "steady":
            return steady(high, total)
        case "step":
            return step(low, high, at, total)
        case "ramp":
            return ramp(low, high, at, length, total)
        case "burst":
            return burst(low, high, at, length, total)
        case _:
            return diurnal(low, high, length, total)


def build_cases(flags: argparse.Namespace) -> list[Case]:
    """Build the loads to simulate from the flags. Raises ValueError, and OSError for files."""
    spec = PLAIN if flags.service is None else read_service(flags.service)
    if flags.trace is None and flags.csv is None:
        cases = [case for case in build_scenarios(spec) if case.name in (flags.scenario or [case.name])]
    else:
        pods = {"start_seconds": flags.start_seconds, "request_seconds": flags.request_seconds}
        cases = [Case(flags.trace or str(flags.csv), spec, build_trace(flags), carries=flags.carries, **pods)]
    return [replace(case, gateways=flags.gateways, depth_age_seconds=flags.depth_age_seconds) for case in cases]


def simulate(flags: argparse.Namespace) -> int:
    """Run the command. Returns the exit code: 2 if the flags or files cannot be simulated."""
    try:
        cases = build_cases(flags)
    except (OSError, ValueError) as error:
        print(f"kubectl conveyor simulate: {error}", file=sys.stderr)
        return 2
    runs = [(case, [Run(case, seed).go() for seed in range(flags.seeds)]) for case in cases]
    rows = [summarise(case, outcomes) for case, outcomes in runs]
    if flags.json:
        print(json.dumps([build_json(row, outcomes) for row, (_, outcomes) in zip(rows, runs, strict=True)], indent=1))
    else:
        print(build_table(rows))
    if flags.plot is None:
        return 0
    case, outcomes = runs[-1]
    try:
        flags.plot.write_text(build_svg(case.name, outcomes[0].samples), encoding="utf-8")
    except OSError as error:
        print(f"kubectl conveyor simulate: {error}", file=sys.stderr)
        return 2
    return 0
