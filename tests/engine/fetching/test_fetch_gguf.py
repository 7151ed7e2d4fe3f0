"""Checks which GGUF files are fetched from a hub, and that mounted ones are found inside their volume only."""

import json
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter
from tests.engine.fetching.hubs import NOWHERE, Fetch
from tests.engine.gguf_files import finish

from conveyor_engine.__main__ import main
from conveyor_engine.errors import ModelError, StartError
from conveyor_engine.fetching.fetch import MARKER
from conveyor_engine.fetching.mounted import check_model_directory
from conveyor_engine.gguf.files import find_files
from e2e.hub.server import Hub

NAMES = (
    "tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf", "mmproj-F16.gguf", "BF16/tiny-BF16-00001-of-00002.gguf",
    "BF16/tiny-BF16-00002-of-00002.gguf",
)  # fmt: skip


@pytest.fixture(autouse=True)
def repository(root: Path) -> Path:
    folder = root / "org/tiny-GGUF"
    (folder / "BF16").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    for name in NAMES:
        (folder / name).write_text(name)
    return folder


def files(target: Path) -> set[str]:
    return {path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()} - {MARKER}


@pytest.mark.parametrize(
    ("uri", "fetched"),
    [
        ("hf://org/tiny-GGUF:Q4_K_M", {"tiny-Q4_K_M.gguf"}),
        ("hf://org/tiny-GGUF@main:tiny-Q8_0.gguf", {"tiny-Q8_0.gguf"}),
        ("hf://org/tiny-GGUF:BF16", set(NAMES[3:])),
    ],
)
def test_one_model_of_a_repository_is_fetched(
    fetch_from: Fetch, hub: Hub, target: Path, uri: str, fetched: set[str]
) -> None:
    fetch_from(hub.url, uri, target)
    assert files(target) == fetched
    assert {path.relative_to(target).as_posix() for path in find_files(target)} == fetched
    fetch_from(NOWHERE, uri, target)


def test_another_file_of_the_repository_replaces_it(fetch_from: Fetch, hub: Hub, target: Path) -> None:
    fetch_from(hub.url, "hf://org/tiny-GGUF:Q4_K_M", target)
    fetch_from(hub.url, "hf://org/tiny-GGUF:Q8_0", target)
    assert files(target) == {"tiny-Q8_0.gguf"}


def test_the_models_are_named_if_the_uri_names_none(fetch_from: Fetch, hub: Hub, target: Path) -> None:
    with pytest.raises(ModelError, match=r"add one to the URI.*it has BF16/tiny-BF16, tiny-Q4_K_M, tiny-Q8_0"):
        fetch_from(hub.url, "hf://org/tiny-GGUF", target)


def test_an_adapter_s_address_names_no_file(fetch_from: Fetch, hub: Hub, target: Path) -> None:
    with pytest.raises(StartError, match="its address cannot name the file 'Q8_0'"):
        fetch_from(hub.url, "hf://org/tiny-GGUF:Q8_0", target, adapter="sql")


def write_gguf(path: Path) -> None:
    writer = GGUFWriter(path, "qwen3")
    writer.add_context_length(4096)
    writer.add_file_type(15)
    writer.add_tensor("token_embd.weight", np.ones((4, 32), dtype=np.float32))
    finish(writer)


@pytest.mark.parametrize("name", ["", "/a.gguf"])
def test_a_mounted_file_is_found_and_its_facts_are_reported(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "llms").mkdir()
    write_gguf(tmp_path / "llms" / "a.gguf")
    monkeypatch.setenv("TERMINATION_LOG", str(tmp_path / "log"))
    arguments = ["--uri", f"pvc://models/llms{name}", "--target", f"{tmp_path}/llms{name}"]
    assert main(["fetch", *arguments]) == 0
    facts = {"contextLength": 4096, "task": "generate", "quantization": "gguf Q4_K_M", "weightBytes": 512}
    assert json.loads((tmp_path / "log").read_text()) == facts


def test_a_link_out_of_the_volume_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "secret.gguf")
    folder = tmp_path / "volume" / "llms"
    (folder / "BF16").mkdir(parents=True)
    for link in ("a.gguf", "BF16/a.gguf"):
        path = folder / link
        path.symlink_to(tmp_path / "secret.gguf")
        for name in ("", "/a.gguf"):
            with pytest.raises(ModelError, match="outside of its volume"):
                check_model_directory(f"pvc://models/llms{name}", Path(f"{folder}{name}"))
        path.unlink()


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "llms").mkdir()
    with pytest.raises(ModelError, match=r"a\.gguf has none of .* and no GGUF file, so it is no model; it is empty"):
        check_model_directory("pvc://models/llms/a.gguf", tmp_path / "llms" / "a.gguf")
