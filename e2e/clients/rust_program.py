"""Builds the program with the client for Rust, once for each version. Used by `scripted`."""

import hashlib
import shutil
from pathlib import Path
from typing import Final

from e2e.cluster import programs
from e2e.cluster.paths import CACHE
from e2e.cluster.progress import announced

VERSION: Final = "0.30.1"
_SOURCE: Final = Path(__file__).parent / "programs" / "rust_clients.rs"
_PACKAGE: Final = f"""\
[package]
name = "rust_clients"
version = "0.1.0"
edition = "2021"

[dependencies]
async-openai = "={VERSION}"
tokio = {{ version = "1", features = ["rt-multi-thread", "macros", "net", "io-util"] }}
futures = "0.3"
serde_json = "1"
"""


def build_rust() -> Path:
    """Return the folder of the program `rust_clients`. What the build leaves behind is deleted."""
    key = hashlib.sha256(_SOURCE.read_bytes() + _PACKAGE.encode()).hexdigest()[:8]
    folder = CACHE / "clients" / f"rust-{key}"
    if (folder / "rust_clients").exists():
        return folder
    partial = folder / "partial"
    shutil.rmtree(partial, ignore_errors=True)
    (partial / "src").mkdir(parents=True)
    shutil.copy(_SOURCE, partial / "src" / "main.rs")
    (partial / "Cargo.toml").write_text(_PACKAGE)
    with announced("building the client for Rust"):
        programs.run("cargo", "build", "--quiet", cwd=partial, check=True)
    shutil.move(partial / "target" / "debug" / "rust_clients", folder / "rust_clients")
    shutil.rmtree(partial)
    return folder
