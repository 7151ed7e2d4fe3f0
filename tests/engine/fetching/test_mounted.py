"""Tests links in a mounted volume, whose content may be hostile."""

import json
from pathlib import Path

import pytest

from conveyor_engine import limited
from conveyor_engine.errors import ModelError
from conveyor_engine.fetching.fetch import fetch

SECRET = "a token of this pod"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secrets" / "token"
    path.parent.mkdir()
    path.write_text(SECRET)
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The mounted folder of `pvc://models/team/tiny` or `oci://registry/image//team/tiny`."""
    folder = tmp_path / "volume" / "team" / "tiny"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


@pytest.mark.parametrize("uri", ["pvc://models/team/tiny", "oci://registry.example/image//team/tiny"])
@pytest.mark.parametrize("link", ["chat_template.jinja", "tokenizer.json", "model.safetensors", "1_Pooling"])
def test_a_file_of_the_container_is_no_file_of_a_model(model: Path, secret: Path, uri: str, link: str) -> None:
    (model / link).symlink_to(secret.parent if link == "1_Pooling" else secret)
    with pytest.raises(
        ModelError, match=f"leads to {secret.parent}.*, outside of its volume {model.parents[1]}"
    ) as caught:
        fetch(uri, str(model))
    assert caught.value.reason == "ModelUnreadable"
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("file", ["config.json", "model.pt2", "model.json", "model_index.json"])
def test_a_folder_with_a_file_of_a_model_is_one(model: Path, file: str) -> None:
    (model / "config.json").unlink()
    (model / "other.bin").write_bytes(b"")
    with pytest.raises(
        ModelError, match=r"none of config.json, .*, model_index.json and no GGUF file, so it is no model; it holds"
    ):
        fetch("pvc://models/team/tiny", str(model))
    (model / file).write_text("{}")
    fetch("pvc://models/team/tiny", str(model))


def test_a_part_of_a_pipeline_is_no_file_of_the_container_and_whole(model: Path, secret: Path) -> None:
    (model / "model_index.json").write_text("{}")
    (model / "unet").mkdir()
    weights = model / "unet/diffusion_pytorch_model.safetensors"
    weights.symlink_to(secret)
    with pytest.raises(ModelError, match="outside of its volume"):
        fetch("pvc://models/team/tiny", str(model))
    weights.unlink()
    weights.write_bytes(b"half")
    with pytest.raises(ModelError, match="is not a whole safetensors file"):
        fetch("pvc://models/team/tiny", str(model))


def test_a_program_is_no_file_of_the_container(model: Path, secret: Path) -> None:
    (model / "model.pt2").symlink_to(secret)
    with pytest.raises(ModelError, match="outside of its volume"):
        fetch("pvc://models/team/tiny", str(model))


def test_a_folder_of_the_container_is_no_model(model: Path, secret: Path) -> None:
    (secret.parent / "config.json").write_text("{}")
    (model.parent / "other").symlink_to(secret.parent)
    with pytest.raises(ModelError, match="outside of its volume"):
        fetch("pvc://models/team/other", str(model.parent / "other"))


@pytest.mark.slow
def test_weights_whose_header_takes_too_much_are_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited, "MEMORY_BYTES", 16 * 2**20)
    header = json.dumps({"__metadata__": {f"key {number}": "" for number in range(1_000_000)}}).encode()
    (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ModelError, match=r"takes more than 60 s of CPU time or .* of memory to read"):
        fetch("pvc://models/team/tiny", str(model))


def test_links_within_the_volume_are_followed(model: Path) -> None:
    """huggingface_hub's cache has such links."""
    blobs = model.parents[1] / "blobs"
    blobs.mkdir()
    (model / "config.json").rename(blobs / "abc")
    (model / "config.json").symlink_to("../../blobs/abc")
    fetch("pvc://models/team/tiny", str(model))
