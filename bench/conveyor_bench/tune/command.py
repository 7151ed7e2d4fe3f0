"""`python -m conveyor_bench tune`: the sweep of `kubectl conveyor tune` with an engine on this machine.

For each setting, an engine process is started. Requests go directly to this process, without a gateway.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from conveyor_api.batching import Batching, BatchingMode
from conveyor_api.quantities import parse_duration_seconds
from conveyor_bench.tune.engine import EngineProcess
from conveyor_engine.errors import StartError
from conveyor_engine.registry import find_task, load_about
from conveyor_engine.termination import find_context_length
from conveyor_insight.tuning.candidates import Plan, make_plan
from conveyor_insight.tuning.flags import add_flags, as_flag, build_sweep, read_load, report
from conveyor_insight.tuning.interruption import run_interruptible
from conveyor_insight.tuning.load import Calibrated, Load
from conveyor_insight.tuning.progress import Progress
from conveyor_insight.tuning.sweep import Result
from conveyor_load.open_loop import Limits, open_session
from conveyor_load.requests import PATHS
from conveyor_load.traces import Trace

_MODES: dict[str, BatchingMode] = {"static": "Static", "dynamic": "Dynamic", "continuous": "Continuous"}
_USUAL_TRIALS = 5


def build_parser() -> argparse.ArgumentParser:
    """Return a parser for the command's options. Flags after `--` are for the engine."""
    parser = argparse.ArgumentParser(prog="python -m conveyor_bench tune", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, metavar="FOLDER", help="a model's directory")
    parser.add_argument("--mode", choices=_MODES, help="batching mode; default: the one of the model's task")
    parser.add_argument(
        "--start-timeout", type=as_flag(parse_duration_seconds), default=900.0, metavar="TIME",
        help="how long an engine may take to be ready (default 15m)",
    )  # fmt: skip
    add_flags(parser)
    parser.add_argument(
        "engine_flags", nargs="*", metavar="-- FLAG", help="of python -m conveyor_engine serve, such as --device=cpu"
    )
    return parser


async def _run(flags: argparse.Namespace, task: str, plan: Plan, trace: Trace, engine_flags: Sequence[str]) -> int:
    progress = Progress(plan.most_candidates * (len(flags.rate) or _USUAL_TRIALS))
    results, is_whole = list[Result](), False
    try:
        async with open_session(Limits()) as session:
            load = Load(trace, flags.seconds, flags.seed, flags.objective, session, progress)
            sweep = build_sweep(flags, trace, load.measure)
            async with EngineProcess(session, flags.model, task, engine_flags, flags.start_timeout) as engine:
                await sweep.go(Calibrated(engine, session), plan, results)
        is_whole = True
    finally:
        progress.clear()
        if results:
            print(report(results, plan, flags, is_whole=is_whole), flush=True)
    return 0 if any(result.best for result in results) else 1


def main(argv: Sequence[str]) -> int:
    """Entry point of the command `tune`. Returns 1 if no setting holds the objectives, 2 if it cannot tune."""
    flags = build_parser().parse_args(argv)
    try:
        task = find_task("auto", flags.model)
        mode = flags.mode or load_about(task).batching_mode
        given: dict[str, Any] = {"mode": _MODES[mode]}
        name = next(name for name in PATHS if name.lower() == task)
        plan = make_plan(Batching(**given), name, flags.max_batch_size, flags.window, flags.max_batch_tokens)
        trace = read_load(flags, name, find_context_length(flags.model))
    except StopIteration:
        print(f"python -m conveyor_bench tune: there is no load for the task {task}", file=sys.stderr)
        return 2
    except (OSError, ValueError, StartError) as error:
        print(f"python -m conveyor_bench tune: {error}", file=sys.stderr)
        return 2
    engine_flags = [f"--batching-mode={mode}", *flags.engine_flags]
    return run_interruptible(_run(flags, name, plan, trace, engine_flags), partial(print, file=sys.stderr))
