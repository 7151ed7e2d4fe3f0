"""Pushes images and chart, and signs them, in the order of `.github/workflows/release.yaml`.

Called by `python -m e2e.release` and by tests. The workflow signs with its own identity, which only a public registry
and Sigstore's public log can check; here a key pair signs, and no log is used.
"""

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from e2e.cluster import programs
from e2e.cluster.paths import REPOSITORY
from e2e.release.tools import COSIGN

_OFFLINE: Final = ("--use-signing-config=false", "--tlog-upload=false", "--yes")


@dataclass(frozen=True, slots=True)
class Key:
    """A key pair of cosign without a password: the files `NAME.key` and `NAME.pub`."""

    private: Path
    public: Path

    @classmethod
    def generate(cls, folder: Path, name: str = "cosign") -> "Key":
        _cosign("generate-key-pair", f"--output-key-prefix={folder / name}")
        return cls(folder / f"{name}.key", folder / f"{name}.pub")


@dataclass(frozen=True, slots=True)
class Release:
    """A published release: `registry/repository@digest` of each part."""

    control: str
    engine: str
    chart: str


def publish(registry: str, images: Mapping[str, str], bills: Path, key: Key, folder: Path) -> Release:
    """Push and sign the release, with a bill of materials for each image. Raises ProgramFailed.

    images: a source for skopeo, such as `oci-archive:FILE`, for `control` and `engine`. bills: the folder of the bills.
    """
    pushed = {name: _push_image(source, f"{registry}/conveyor/{name}", folder) for name, source in images.items()}
    for name, reference in pushed.items():
        _cosign("sign", *_OFFLINE, f"--key={key.private}", reference)
        predicate = (f"--predicate={bills / name}.cdx.json", "--type=cyclonedx")
        _cosign("attest", *_OFFLINE, f"--key={key.private}", *predicate, reference)
    chart = _push_chart(registry, pushed, folder)
    _cosign("sign", *_OFFLINE, f"--key={key.private}", chart)
    return Release(pushed["control"], pushed["engine"], chart)


def verify(release: Release, key: Key) -> None:
    """Check every signature and both bills of materials. Raises ProgramFailed."""
    options = (f"--key={key.public}", "--insecure-ignore-tlog")
    for reference in (release.control, release.engine, release.chart):
        _cosign("verify", *options, reference)
    for reference in (release.control, release.engine):
        _cosign("verify-attestation", *options, "--type=cyclonedx", reference)


def _push_image(source: str, repository: str, folder: Path) -> str:
    digest = folder / "digest"
    options = ("--insecure-policy", "--quiet", "--dest-tls-verify=false", f"--digestfile={digest}")
    programs.run_quietly("skopeo", "copy", *options, source, f"docker://{repository}:release")
    return f"{repository}@{digest.read_text().strip()}"


def _push_chart(registry: str, images: Mapping[str, str], folder: Path) -> str:
    digests = [f"--{name}={reference.partition('@')[2]}" for name, reference in images.items()]
    package = REPOSITORY / "charts" / "package.py"
    chart = programs.run_quietly("python", package, f"--registry={registry}", *digests, f"--out={folder}").strip()
    push = ("push", chart, f"oci://{registry}/charts", "--plain-http")
    done = programs.run("helm", *push, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    found = re.search(r"^Digest: (\S+)$", done.stdout, re.MULTILINE)
    if found is None:
        raise programs.ProgramFailed(f"helm push failed:\n{done.stdout}")
    return f"{registry}/charts/conveyor@{found[1]}"


def _cosign(*arguments: str) -> None:
    options: dict[str, Any] = {"capture_output": True, "text": True, "env": os.environ | {"COSIGN_PASSWORD": ""}}
    done = programs.run(COSIGN, *arguments, **options)
    if done.returncode:
        raise programs.ProgramFailed(f"cosign {' '.join(arguments)} failed:\n{done.stderr[-2000:]}")
