"""Drives a peer in a process of its own, which computes only while a step is asked for. Used by `engine.command`.

The process is a script beside this file. Both sides speak lines of JSON: {"prompts", "output_tokens"} begins a run,
null asks for its next step. To each line comes one answer: first 0, when all is ready, then how many tokens every
request has, and at last all of them.
"""

import json
import os
import shutil
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import torch

from conveyor_bench.comparing.systems import Prompts, Run


class PeerProcess:
    """One script's system, for one model. The process ends with this object."""

    def __init__(self, script: str, model: Path, dtype: str) -> None:
        options = ["--python", sys.executable, "--script", str(cached(Path(__file__).parent / script))]
        command = [find_uv(), "run", *options, str(model), dtype, str(torch.get_num_threads())]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        weakref.finalize(self, end, self._process)

    def start(self, prompts: Prompts, output_tokens: int) -> Run:
        """The process has made room for the run when this returns."""
        ready = self._ask({"prompts": prompts, "output_tokens": output_tokens})
        assert ready == 0, ready
        return self._run()

    def _run(self) -> Run:
        while isinstance(told := self._ask(None), int):
            yield told
        outputs: Prompts = told
        return outputs

    def _ask(self, question: object) -> Any:
        """Raises RuntimeError if the process has ended; what it said is on standard error."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            answer = ""
        else:
            answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the peer's process ended: {self._process.args!r}")
        return json.loads(answer)


def end(process: "subprocess.Popen[str]") -> None:
    """The process ends by itself when nobody can ask any more."""
    process.communicate()


def cached(script: Path) -> Path:
    """Its copy in the project's cache: uv keeps an environment for each path, and this one is every checkout's."""
    folder = Path(os.environ.get("CONVEYOR_CACHE") or Path.home() / ".cache" / "conveyor") / "peers"
    folder.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(script, folder))


def find_uv() -> str:
    """The uv that runs us, or the one on the path. Exits without one."""
    found = os.environ.get("UV") or shutil.which("uv")
    if found is None:
        raise SystemExit("uv is missing, which installs this peer: uv run --no-sync python -m ...")
    return found
