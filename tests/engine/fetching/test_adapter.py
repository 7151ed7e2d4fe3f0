"""Tests `fetch` with LoRA adapters in PEFT's format: from a hub, a bucket and a mounted volume."""

import json
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
from safetensors.numpy import save_file
from tests.engine.fetching.buckets import BUCKET, Server
from tests.engine.fetching.hubs import NOWHERE, Fetch
from tests.engine.processes import environment

from conveyor_engine.errors import ModelError
from conveyor_engine.fetching.fetch import MARKER, fetch
from e2e.hub.server import Hub

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def write_adapter(folder: Path) -> Path:
    """Write files like an adapter's, with the others that PEFT and trainers leave beside them."""
    folder.mkdir(parents=True)
    (folder / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 8}))
    save_file({"a": numpy.zeros((8, 4), numpy.float32)}, folder / WEIGHTS)
    (folder / "adapter_model.bin").write_bytes(b"pickle")
    (folder / "README.md").write_text("An adapter.")
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (folder / name).write_text("{}")
    return folder


def test_an_adapter_s_two_files_are_fetched_once(fetch_from: Fetch, hub: Hub, root: Path, target: Path) -> None:
    folder = write_adapter(root / "org/sql")
    fetch_from(hub.url, "hf://org/sql", target, adapter="sql")
    assert {path.name for path in target.iterdir()} == {CONFIG, WEIGHTS, MARKER}
    assert (target / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()
    fetch_from(NOWHERE, "hf://org/sql", target, adapter="sql")
    (target / WEIGHTS).write_bytes(b"short")
    fetch_from(hub.url, "hf://org/sql", target, adapter="sql")
    assert (target / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()


def test_an_adapter_comes_from_a_bucket(server: Server, root: Path, target: Path) -> None:
    folder = write_adapter(root / "org/sql")
    server.upload(folder, "teams/a/sql")
    fetch(f"s3://{BUCKET}/teams/a/sql", str(target), "sql")
    assert {path.name for path in target.iterdir()} == {CONFIG, WEIGHTS, MARKER}
    assert (target / CONFIG).read_bytes() == (folder / CONFIG).read_bytes()


@pytest.mark.parametrize(
    ("missing", "problem"),
    [
        (CONFIG, "has no adapter_config.json, so it is no adapter in PEFT's format"),
        (WEIGHTS, "has no adapter_model.safetensors, only adapter_model.bin, and pickles can run code"),
    ],
)
def test_what_is_missing_is_reported_with_the_adapter_s_name(
    fetch_from: Fetch, hub: Hub, root: Path, target: Path, missing: str, problem: str
) -> None:
    folder = write_adapter(root / "org/sql")
    (folder / missing).unlink()
    with pytest.raises(ModelError, match=rf"adapter sql: org/sql@\w+ {problem}"):
        fetch_from(hub.url, "hf://org/sql", target, adapter="sql")
    assert not target.exists()
    with pytest.raises(ModelError, match=rf"adapter sql: pvc://models/sql: {folder} {problem}.*; it holds") as caught:
        fetch("pvc://models/sql", str(folder), "sql")
    assert caught.value.reason == "ModelNotFound"


def test_a_mounted_adapter_is_whole_and_inside_its_volume(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "volume" / "sql")
    fetch("pvc://models/sql", str(folder), "sql")
    with pytest.raises(ModelError, match=r"adapter sql: .*there is no directory"):
        fetch("pvc://models/other", str(folder.parent / "other"), "sql")
    weights = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(weights[:-1])
    with pytest.raises(ModelError, match="is not a whole safetensors file"):
        fetch("pvc://models/sql", str(folder), "sql")
    (folder / WEIGHTS).unlink()
    (tmp_path / "secret").write_bytes(weights)
    (folder / WEIGHTS).symlink_to(tmp_path / "secret")
    with pytest.raises(ModelError, match="outside of its volume"):
        fetch("pvc://models/sql", str(folder), "sql")


@pytest.mark.parametrize(("adapter", "facts"), [("", {"task": "generate", "weightBytes": 200}), ("sql", None)])
def test_an_adapter_s_fetch_reports_no_facts_about_the_model(
    tmp_path: Path, adapter: str, facts: dict[str, str | int] | None
) -> None:
    """With the same files, a model's fetch reports the task."""
    folder, log = write_adapter(tmp_path / "volume" / "sql"), tmp_path / "termination"
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    command = ["-m", "conveyor_engine", "fetch", "--uri", "pvc://models/sql", "--target", str(folder)]
    more = ["--adapter", adapter] if adapter else []
    subprocess.run([sys.executable, *command, *more], env=environment(TERMINATION_LOG=str(log)), check=True)
    assert (json.loads(log.read_text()) if log.exists() else None) == facts
