"""Installs one client and runs it: `run`. Used by `python -m e2e.clients` and by the stories."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from e2e.clients.client import Client
from e2e.clients.reports import ClientFailed
from e2e.cluster import programs
from e2e.cluster.paths import CACHE

FOLDER = CACHE / "clients"
RUN_SECONDS_MAX = 600.0
_COMPLETE = ".complete"
_OUTPUT_CHARACTERS = 4000


@dataclass(frozen=True, slots=True)
class Target:
    """A service, and the tokenizer of its model for clients that count tokens themselves."""

    url: str  # ending in /v1
    model: str
    tokenizer: Path


def run(client: Client, target: Target) -> str:
    """Run a client. Returns what passed, as a phrase. Raises ClientFailed with the end of the client's output."""
    environment = install(client)
    with tempfile.TemporaryDirectory(prefix="conveyor-client-") as out:
        words = {
            "env": environment, "url": target.url, "base": target.url.removesuffix("/v1"), "model": target.model,
            "tokenizer": target.tokenizer, "out": out,
        }  # fmt: skip
        program, *arguments = (word.format(**words) for word in client.command)
        try:
            done = programs.run(
                Path(program) if "/" in program else program, *arguments,
                cwd=client.folder or environment, env=_environment(client), timeout=RUN_SECONDS_MAX,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise ClientFailed(f"{client.name} did not end within {RUN_SECONDS_MAX:g} s") from None
        if done.returncode:
            raise ClientFailed(f"{client.name} ended with {done.returncode}:\n{done.stdout[-_OUTPUT_CHARACTERS:]}")
        return client.judge(done.stdout, Path(out))


def install(client: Client) -> Path:
    """Return the client's environment. It is made at its first use, and replaced for another version of the client."""
    if client.make is not None:
        return client.make()
    key = hashlib.sha256("\0".join([sys.version, *client.packages]).encode()).hexdigest()[:8]
    name = re.sub("[^a-z]+", "-", client.name.partition(",")[0].lower()).strip("-")
    folder = FOLDER / f"{name}-{key}"
    if not (folder / _COMPLETE).exists():
        for old in FOLDER.glob(f"{name}-{'?' * len(key)}"):
            shutil.rmtree(old, ignore_errors=True)
        folder.mkdir(parents=True)
        npm = [package.removeprefix("npm:") for package in client.packages if package.startswith("npm:")]
        python = [package for package in client.packages if not package.startswith("npm:")]
        if npm:
            _step("npm", "install", "--no-audit", "--no-fund", "--prefix", folder, *npm)
        if python:
            _step("uv", "venv", "--quiet", "--allow-existing", "--python", sys.executable, folder)
            _step("uv", "pip", "install", "--quiet", "--python", folder / "bin" / "python", *python)
        (folder / _COMPLETE).touch()
    return folder


def _step(program: str, *arguments: str | Path) -> None:
    try:
        programs.run_quietly(program, *arguments)
    except programs.ProgramFailed as error:
        raise ClientFailed(str(error)) from error


def _environment(client: Client) -> dict[str, str]:
    """Return the client's variables: this process's PATH, no key, no proxy, and a HOME that is the clients' own."""
    home = FOLDER / "home"
    home.mkdir(parents=True, exist_ok=True)
    return {"PATH": os.environ.get("PATH", ""), "HOME": str(home), "LANG": "C.UTF-8", **client.environment}
