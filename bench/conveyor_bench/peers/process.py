"""Drives a peer in a separate process, which computes only while a step is requested. Used by `engine.command`.

The process is a script beside this file. Both sides send lines of JSON. {"prompts", "output_tokens"} begins a run, and
null requests the run's next step. The process answers each line with one line: first 0, when it is ready for the run,
then after each step how many tokens every request has, and at the end all tokens.
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
        """Start a run. When this returns, the process has made room for the run."""
        ready = self._exchange({"prompts": prompts, "output_tokens": output_tokens})
        assert ready == 0, ready
        return self._run()

    def _run(self) -> Run:
        while isinstance(reply := self._exchange(None), int):
            yield reply
        outputs: Prompts = reply
        return outputs

    def _exchange(self, question: object) -> Any:
        """Send a line and return the answer. Raises RuntimeError if the process has ended."""
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
    """Close the standard input of the process, which then ends by itself, and wait for the end."""
    process.communicate()


def cached(script: Path) -> Path:
    """Copy the script into the project's cache. Returns the copy.

    uv keeps an environment for each path, so all checkouts use the same environment.
    """
    folder = Path(os.environ.get("CONVEYOR_CACHE") or Path.home() / ".cache" / "conveyor") / "peers"
    folder.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(script, folder))


def find_uv() -> str:
    """Return the uv that runs this program, or else the uv on the path. Exits if there is none."""
    found = os.environ.get("UV") or shutil.which("uv")
    if found is None:
        raise SystemExit("cannot find uv, which installs this peer; run the command as: uv run --no-sync python -m ...")
    return found
