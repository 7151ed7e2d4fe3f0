"""Builds the program with the clients for Go, once for each set of versions. Used by `matrix`."""

import hashlib
import shutil
from pathlib import Path
from typing import Any, Final

from e2e.cluster import programs
from e2e.cluster.paths import CACHE
from e2e.cluster.progress import announced
from e2e.go_module import build_environment

MODULES: Final = {
    "openai": "github.com/openai/openai-go/v3@v3.99.0",
    "anthropic": "github.com/anthropics/anthropic-sdk-go@v1.84.0",
    "langchaingo": "github.com/tmc/langchaingo@v0.1.14",
}
_SOURCE: Final = Path(__file__).parent / "programs" / "go_clients.go"


def build_go() -> Path:
    """Return the folder of the program `clients`. What Go caches for the build is deleted afterwards."""
    key = hashlib.sha256(_SOURCE.read_bytes() + repr(MODULES).encode()).hexdigest()[:8]
    folder = CACHE / "clients" / f"go-{key}"
    if (folder / "clients").exists():
        return folder
    partial = folder / "partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    shutil.copy(_SOURCE, partial / "main.go")
    environment = build_environment(partial / "modules") | {"GOCACHE": str(partial / "build"), "CGO_ENABLED": "0"}
    options: dict[str, Any] = {"cwd": partial, "env": environment, "check": True}
    with announced("building the clients for Go"):
        programs.run("go", "mod", "init", "clients", **options)
        programs.run("go", "get", *MODULES.values(), **options)
        programs.run("go", "build", "-ldflags=-s -w", "-o", folder / "clients", ".", **options)
    shutil.rmtree(partial)
    return folder
