"""Tests `fetch` of diffusion pipelines, whose parts have a folder each, from a hub and from a bucket."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.engine.fetching.buckets import BUCKET, URI, Server
from tests.engine.fetching.hubs import INDEX, NOWHERE, Fetch, running_hub

from conveyor_engine.errors import ModelError
from conveyor_engine.fetching import bucket
from conveyor_engine.fetching import hub as hub_module
from conveyor_engine.fetching.fetch import MARKER, fetch
from conveyor_engine.fetching.source import keep_known
from conveyor_engine.model_files import check_files
from e2e.hub.server import Hub

UNET = "unet/diffusion_pytorch_model.safetensors"
PARTS = {
    "text_encoder": ("config.json", "model.safetensors"),
    "tokenizer": ("merges.txt", "special_tokens_map.json", "tokenizer_config.json", "vocab.json"),
}
WANTED = {
    "model_index.json", "scheduler/scheduler_config.json", "text_encoder/config.json", "text_encoder/model.safetensors",
    "tokenizer/merges.txt", "tokenizer/special_tokens_map.json", "tokenizer/tokenizer_config.json",
    "tokenizer/vocab.json", "unet/config.json", UNET, "vae/config.json", "vae/diffusion_pytorch_model.safetensors",
}  # fmt: skip
UNWANTED = (
    "README.md", "v1-5-pruned.ckpt", "v1-5-pruned.safetensors", INDEX, "feature_extractor/preprocessor_config.json",
    "safety_checker/config.json", "safety_checker/model.safetensors", "text_encoder/model.fp16.safetensors",
    "text_encoder/pytorch_model.bin", "text_encoder/flax_model.msgpack", "unet/diffusion_pytorch_model.bin",
    "unet/diffusion_pytorch_model.fp16.safetensors", "unet/diffusion_pytorch_model.non_ema.safetensors",
    "unet/model.onnx", "unet/openvino_model.xml", "unet/run.py", "unet/deeper/config.json",
    "vae/diffusion_flax_model.msgpack", "vae/diffusion_pytorch_model.fp16.safetensors",
)  # fmt: skip


# The further parts of a pipeline with a transformer and three text encoders, the last one in two files.
FURTHER = {
    *(f"{folder}_2/{name}" for folder, names in PARTS.items() for name in names),
    *(f"text_encoder_3/model-0000{number}-of-00002.safetensors" for number in (1, 2)), "text_encoder_3/config.json",
    "text_encoder_3/model.safetensors.index.json", "tokenizer_3/tokenizer.json", "tokenizer_3/tokenizer_config.json",
    "transformer/config.json", "transformer/diffusion_pytorch_model.safetensors",
}  # fmt: skip
FURTHER_UNWANTED = (
    "text_encoder_3/model.fp16-00001-of-00002.safetensors", "text_encoder_3/model.safetensors.index.fp16.json",
    "text_encoders/t5xxl_fp16.safetensors", "tokenizer_3/spiece.model", "text_encoder_2/model.fp16.safetensors",
)  # fmt: skip


@pytest.fixture(autouse=True)
def pipeline(root: Path) -> Path:
    """The repository `org/tiny`, which has the files of a published pipeline."""
    folder = root / "org/tiny"
    shutil.rmtree(folder)
    write(folder, *WANTED, *UNWANTED)
    return folder


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps({"name": name}))


@pytest.fixture(params=["hub", "bucket"])
def fetch_it(request: pytest.FixtureRequest, target: Path) -> Callable[[], None]:
    """A function that fetches `org/tiny` from the source."""
    if request.param == "bucket":
        server: Server = request.getfixturevalue("server")
        assert server.url
        return lambda: fetch(URI, str(target))
    hub, fetch_from = request.getfixturevalue("hub"), request.getfixturevalue("fetch_from")
    return lambda: fetch_from(hub.url, "hf://org/tiny", target)


def files_of(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_only_the_loaded_files_of_a_pipeline_are_fetched(
    fetch_it: Callable[[], None], pipeline: Path, target: Path
) -> None:
    fetch_it()
    assert files_of(target) == WANTED | {MARKER}
    for name in WANTED:
        assert (target / name).read_bytes() == (pipeline / name).read_bytes()
    (target / UNET).write_bytes(b"short")
    fetch_it()
    assert (target / UNET).read_bytes() == (pipeline / UNET).read_bytes()


def test_a_complete_pipeline_needs_no_hub(fetch_from: Fetch, hub: Hub, target: Path) -> None:
    fetch_from(hub.url, "hf://org/tiny", target)
    fetch_from(NOWHERE, "hf://org/tiny", target)


def test_a_part_without_whole_weights_is_refused(fetch_from: Fetch, hub: Hub, pipeline: Path, target: Path) -> None:
    (pipeline / UNET).unlink()
    with pytest.raises(ModelError, match=rf"has no {UNET}, .*; unet has .*\.fp16\.safetensors") as caught:
        fetch_from(hub.url, "hf://org/tiny", target)
    assert caught.value.reason == "UnsupportedModel"


def test_further_text_encoders_a_transformer_and_weights_in_several_files_are_fetched(
    fetch_from: Fetch, hub: Hub, pipeline: Path, target: Path
) -> None:
    shutil.rmtree(pipeline / "unet")
    write(pipeline, *FURTHER, *FURTHER_UNWANTED)
    fetch_from(hub.url, "hf://org/tiny", target)
    assert files_of(target) == {name for name in WANTED if not name.startswith("unet/")} | FURTHER | {MARKER}


def test_a_part_without_one_of_its_files_is_incomplete(pipeline: Path) -> None:
    index = pipeline / "unet/diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "diffusion_pytorch_model-00001-of-00001.safetensors"}}))
    for path in pipeline.rglob("*.safetensors"):
        path.unlink()
    with pytest.raises(ModelError, match=r"unet is incomplete: .* names diffusion_pytorch_model-00001-of-00001"):
        check_files(pipeline)


def test_no_weights_of_a_pipeline_that_the_engine_rejects_are_downloaded(
    fetch_from: Fetch, hub: Hub, pipeline: Path, target: Path
) -> None:
    (pipeline / "model_index.json").write_text(json.dumps({"_class_name": "WanPipeline"}))
    with pytest.raises(ModelError, match=r"the model is a WanPipeline; .* Its weights were not downloaded"):
        fetch_from(hub.url, "hf://org/tiny", target, task="auto")
    assert not [request for request in hub.requests if UNET in str(request)]


def test_the_files_of_all_folders_count(
    monkeypatch: pytest.MonkeyPatch, fetch_from: Fetch, hub: Hub, target: Path
) -> None:
    monkeypatch.setattr(hub_module, "MAX_FILES", 20)
    with pytest.raises(ModelError, match="org/tiny has more than 20 files"):
        fetch_from(hub.url, "hf://org/tiny", target)


def test_the_files_of_all_folders_of_a_bucket_count(
    monkeypatch: pytest.MonkeyPatch, server: Server, target: Path
) -> None:
    monkeypatch.setattr(bucket, "MAX_FILES", 20)
    with pytest.raises(ModelError, match="more than 20 files"):
        fetch(URI, str(target))


@pytest.mark.parametrize("name", ["unet/../../evil.safetensors", "unet//evil.safetensors", "unet/..", "../unet/x.json"])
def test_a_name_that_leads_outside_is_not_known(name: str) -> None:
    assert keep_known(["model_index.json", UNET, name]) == {"model_index.json", UNET}


def test_without_the_index_the_folders_are_not_read(
    fetch_from: Fetch, server: Server, root: Path, target: Path
) -> None:
    server.client().delete_object(Bucket=BUCKET, Key="teams/a/tiny/model_index.json")
    with pytest.raises(ModelError, match="it is no model"):
        fetch(URI, str(target))
    assert not [path for _, path, _ in server.requests if "/unet/" in path]
    (root / "org/tiny/model_index.json").unlink()
    with running_hub(root) as hub, pytest.raises(ModelError, match="it is no model"):
        fetch_from(hub.url, "hf://org/tiny", target)
