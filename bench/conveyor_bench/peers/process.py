"""Drives a peer in a separate process, which computes only while a step is requested. Used by `engine.command`.

The process is a script beside this file. Both sides send lines of JSON. {"prompts", "output_tokens"} begins a run, and
null requests the run's next step. The process answers each line with one line: first 0, when it is ready for the run,
then after each step how many tokens each request has, and at the end all tokens. With "images", which has the path of a
file for each prompt, the prompts are of images and texts.
"""

import json
import os
import shutil
import subprocess
import sys
import weakref
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

import torch

from conveyor_bench.comparing.systems import Prompts, Run
from conveyor_bench.peers import gguf_file

_VERSION: Final = "3.22.1"
_NODE_PACKAGES: Final = (f"node-llama-cpp@{_VERSION}", f"@node-llama-cpp/linux-x64@{_VERSION}")


class PeerProcess:
    """One script's system, for one model. The process ends with this object.

    settings: further arguments of the script.
    """

    def __init__(self, script: str, model: Path, dtype: str, *settings: str) -> None:
        options = ["--python", sys.executable, "--script", str(cached(Path(__file__).parent / script))]
        self._open([find_uv(), "run", *options, str(model), dtype, str(torch.get_num_threads()), *settings])

    def _open(self, command: list[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        weakref.finalize(self, end, self._process)

    def start(self, prompts: Prompts, output_tokens: int) -> Run:
        """Start a run. When this returns, the process has made room for the run."""
        return _fewest(self.begin(prompts=prompts, output_tokens=output_tokens))

    def begin(self, **run: object) -> Generator[list[int], None, Prompts]:
        """Start a run of the protocol's fields. It yields after each step how many tokens each request has."""
        ready = self._exchange(run)
        assert ready == 0, ready
        return self._run()

    def _run(self) -> Generator[list[int], None, Prompts]:
        while isinstance((reply := self._exchange(None))[0], int):
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


class NodeLlama(PeerProcess):
    """llama.cpp by node-llama-cpp, which is installed first. `gguf_file` has written the weights.

    method: `plain`, `lookup`, or `draft` with the directory of a draft model.
    """

    def __init__(self, model: Path, method: str, draft: Path | None = None) -> None:
        script = cached(Path(__file__).parent / "run_node_llama.mjs")
        install = ["npm", "install", "--no-audit", "--no-fund", "--omit=optional", "--prefix", str(script.parent)]
        subprocess.run([*install, *_NODE_PACKAGES], check=True, stdout=subprocess.DEVNULL)
        models = [str(folder / gguf_file.NAME) for folder in (model, draft) if folder]
        self._open(["node", str(script), models[0], str(torch.get_num_threads()), method, *models[1:]])


def _fewest(counts: Generator[list[int], None, Prompts]) -> Run:
    """Yield the smallest number of each list."""
    while True:
        try:
            yield min(next(counts))
        except StopIteration as stop:
            outputs: Prompts = stop.value
            return outputs


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
