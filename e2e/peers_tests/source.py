"""Downloads vLLM's source with its tests, and makes an environment that can import them. Used by `__main__`, and by
`e2e.clients` for vLLM's load generator.

The tests import vLLM's protocol classes and tokenizers, which are Python code. Nothing of vLLM is compiled or replaced
by stubs.
"""

import hashlib
import shutil
import sys
import tarfile
import urllib.request
from pathlib import Path

from e2e.cluster import programs
from e2e.cluster.paths import CACHE

VERSION = "0.33.0"
URL = (
    "https://files.pythonhosted.org/packages/f7/25/aa5684e9c59d6fc75f78926b7f15e8d9adc7de2d9e6e7575b80776ad8169/"
    f"vllm-{VERSION}.tar.gz"
)
SHA256 = "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112"
PACKAGES = (
    "torch==2.15.0",  # the same version as the engine's
    *("pytest==9.2.0", "pytest-asyncio==1.5.0", "pytest-timeout==2.4.0", "tblib==3.2.2"),  # for vLLM's conftest.py
    *("schemathesis==4.32.5", "sentence-transformers==6.2.0"),
)
FOLDER = CACHE / "peers-tests"
_BYTES_MAX = 200 * 2**20
_COMPLETE = ".complete"


def fetch() -> Path:
    """Return the folder of the unpacked source, which is downloaded once. Raises SystemExit if the archive is not the
    pinned one."""
    folder = FOLDER / f"vllm-{VERSION}"
    if (folder / _COMPLETE).exists():
        return folder
    FOLDER.mkdir(parents=True, exist_ok=True)
    archive = FOLDER / f"vllm-{VERSION}.tar.gz"
    with urllib.request.urlopen(URL, timeout=60) as answer:
        content = answer.read(_BYTES_MAX)
    if (found := hashlib.sha256(content).hexdigest()) != SHA256:
        raise SystemExit(f"{URL} has the SHA-256 {found} instead of {SHA256}")
    archive.write_bytes(content)
    shutil.rmtree(folder, ignore_errors=True)
    with tarfile.open(archive) as packed:
        packed.extractall(FOLDER, filter="data")
    archive.unlink()
    (folder / _COMPLETE).touch()
    return folder


def install(source: Path) -> Path:
    """Return the Python of an environment with the tests' imports. It is made once for each version and list of
    packages."""
    requirements = source / "requirements" / "common.txt"
    key = hashlib.sha256("\0".join([sys.version, VERSION, *PACKAGES]).encode()).hexdigest()[:8]
    folder = FOLDER / f"environment-{key}"
    python = folder / "bin" / "python"
    if not (folder / _COMPLETE).exists():
        for old in FOLDER.glob("environment-*"):
            shutil.rmtree(old)
        programs.run_quietly("uv", "venv", "--quiet", "--clear", "--python", sys.executable, folder)
        programs.run_quietly(
            "uv", "pip", "install", "--quiet", "--python", python, "--requirement", requirements, *PACKAGES
        )
        (folder / _COMPLETE).touch()
    return python


def provide() -> Path:
    """Return the folder of the environment, after both steps."""
    return install(fetch()).parent.parent
