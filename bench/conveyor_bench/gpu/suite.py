"""`python -m conveyor_bench gpu`: all that is to be measured on a GPU, stage by stage.

Each stage is a separate process with a time limit, and writes FOLDER/STAGE.jsonl as it goes. A stage that has ended as
`done` runs again only with --again. FOLDER/gpu.md has the tables of all stages that ran. The suite does not use the
network. It needs torch, triton, transformers and msgspec. A stage that needs more packages is skipped where they are
missing: `tests` needs pytest and PIL, `http` the server's packages, and `tasks` pytest, PIL, diffusers, soundfile and
soxr. --rehearse runs the same on a CPU, with everything tiny.
"""

import argparse
import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from conveyor_bench.gpu.predicting.constants import PARTS
from conveyor_bench.gpu.results import DONE, Results
from conveyor_bench.gpu.stages import STAGES, Stage
from conveyor_bench.gpu.table import write_tables

_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
_SKIPPED = "skipped"
_REQUIRED = ("torch", "triton", "transformers", "msgspec")


def main(argv: Sequence[str]) -> int:
    """Run the suite.

    Returns the exit code: 0 if all chosen stages are done, or skipped because a package is missing.
    """
    arguments = _parse(argv)
    folder: Path = arguments.out
    if arguments.predict:
        from conveyor_bench.gpu.predicting import command

        return command.run(arguments.device)
    if arguments.list:
        for stage in STAGES.values():
            print(f"{stage.name:15} {Results(folder, stage.name).how():10} {stage.what}")
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    ended = [_ensure(STAGES[name], arguments) for name in arguments.stage or STAGES]
    _write_page(folder)
    return 0 if set(ended) <= {DONE, _SKIPPED} else 1


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m conveyor_bench gpu", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder of the results")
    parser.add_argument("--stage", action="append", choices=STAGES, help="only this one; may be given again")
    parser.add_argument("--again", action="store_true", help="run stages that are done already, too")
    parser.add_argument("--list", action="store_true", help="only say which stages there are, and how they ended")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with everything tiny")
    parser.add_argument("--enforce-eager", action="store_true", help="engines without CUDA graphs, but in `http`")
    parser.add_argument("--predict", action="store_true", help="only compute what `nano` should reach; needs no GPU")
    parser.add_argument("--device", choices=PARTS, default="h200", help="of the prediction (default %(default)s)")
    parser.add_argument("--commit", help="what to call the code, where git cannot say it")
    arguments = parser.parse_args(argv)
    if not arguments.list and (missing := _find_missing(_REQUIRED)):
        parser.error(f"not installed: {', '.join(missing)}; a folder of `pip install --target` in PYTHONPATH is enough")
    return arguments


def _find_missing(modules: Sequence[str]) -> list[str]:
    return [module for module in modules if importlib.util.find_spec(module) is None]


def _ensure(stage: Stage, arguments: argparse.Namespace) -> str:
    """Run the stage unless it is done. Returns how it ended."""
    results = Results(arguments.out, stage.name)
    if results.how() == DONE and not arguments.again:
        print(f"event=stage_kept name={stage.name}", flush=True)
        return DONE
    if missing := _find_missing(stage.needs):
        results.begin({})
        results.end(_SKIPPED, 0, f"not installed: {', '.join(missing)}")
        return _SKIPPED
    print(f"event=stage_begins name={stage.name} limit_seconds={stage.limit_seconds:.0f}", flush=True)
    _run(stage, results, arguments)
    print(f"event=stage_ended name={stage.name} how={results.how()!r}", flush=True)
    return results.how()


def _run(stage: Stage, results: Results, arguments: argparse.Namespace) -> None:
    """Run the stage until it ends, by itself or at its time limit. Raises KeyboardInterrupt."""
    results.path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "conveyor_bench.gpu.stage", stage.name, "--out", str(arguments.out)]
    command += ["--rehearse"] if arguments.rehearse else []
    command += ["--enforce-eager"] if arguments.enforce_eager else []
    command += ["--commit", arguments.commit] if arguments.commit else []
    started = time.monotonic()
    process = subprocess.Popen(command, env=_environment(stage, arguments.rehearse), start_new_session=True)
    try:
        process.wait(stage.limit_seconds)
    except subprocess.TimeoutExpired:
        _end(process)
        results.end("timed out", time.monotonic() - started, f"after {stage.limit_seconds:.0f} s")
    finally:
        _end(process)
    if "end" not in (results.read() or [{}])[-1]:
        results.end("failed", time.monotonic() - started, f"the process ended with exit code {process.returncode}")


def _environment(stage: Stage, rehearse: bool) -> dict[str, str]:
    """Return this process's environment, offline, without variables that would affect pytest or an engine."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "CONVEYOR_ENGINE_"))}
    kept |= _OFFLINE
    if rehearse:
        kept["OMP_NUM_THREADS"] = "1"  # tiny products take longer on several threads
    if rehearse and stage.interprets:
        kept["TRITON_INTERPRET"] = "1"
    return kept


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End all processes in the stage's process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _write_page(folder: Path) -> None:
    page = write_tables({name: Results(folder, name).read() for name in STAGES})
    (folder / "gpu.md").write_text(page)
    print(f"event=tables_written path={folder / 'gpu.md'}", flush=True)
