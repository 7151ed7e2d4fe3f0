"""Rejects a model by the files beside its weights, before these are downloaded. A program that `fetching` starts.

`python -m conveyor_engine.execution.models.preview DIRECTORY TASK` makes the checks of `loader` that need neither the
weights nor the model's class. It hides torch from transformers: the program then takes 80 MiB of memory and not 700.
If the model is rejected, it prints the error as JSON.
"""

import json
import sys
from pathlib import Path
from typing import Final

from conveyor_engine.errors import StartError
from conveyor_engine.limited import limit_cpu_seconds, limit_more_memory
from conveyor_engine.quantization import check_declared, read_declared
from conveyor_engine.registry import find_task, load_about

_CPU_SECONDS: Final = 60.0
_MEMORY_BYTES: Final = 2 * 2**30


def check(directory: Path, task: str) -> None:
    """Check the model for the task; `auto`: for the one that its files show. Raises StartError."""
    from conveyor_engine.execution.models import checks
    from conveyor_engine.execution.models.kinds import CAUSAL_LM, find_kind

    found = find_task(task, directory)
    if (check_files := load_about(found).check) is not None:
        check_files(directory)
    kind = find_kind(found, directory)
    if kind is None:
        return
    checks.read_config(directory, kind)
    if (declared := read_declared(directory)) is not None:
        check_declared(directory, declared, vllm_serves=kind is CAUSAL_LM)


def main(directory: str, task: str) -> None:
    """Run the program."""
    limit_cpu_seconds(_CPU_SECONDS)
    limit_more_memory(_MEMORY_BYTES)
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        check(Path(directory), task)
    except StartError as error:
        print(json.dumps({"reason": error.reason, "message": str(error)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
