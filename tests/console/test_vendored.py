"""Tests that the files of htmx are those of the package and version that `console/htmx.lock.json` names."""

import hashlib
import json

from e2e.cluster.paths import REPOSITORY

CONSOLE = REPOSITORY / "console"
OWN = {"console.css"}


def test_every_file_is_ours_or_is_locked() -> None:
    lock = json.loads((CONSOLE / "htmx.lock.json").read_text())
    files = {path.name: path.read_bytes() for path in (CONSOLE / "conveyor_console" / "static").iterdir()}
    assert files.keys() == lock["files"].keys() | OWN
    hashes = {name: hashlib.sha256(files[name]).hexdigest() for name in lock["files"]}
    assert hashes == {name: file["sha256"] for name, file in lock["files"].items()}
    assert lock["version"] in lock["source"]
