"""Tests that a model which its small files rule out is rejected before its weights are downloaded."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.engine.fetching.hubs import WEIGHTS, Fetch

from conveyor_api import names
from conveyor_engine.errors import ModelError
from conveyor_engine.execution.models.quantized.checkpoint import GGUF
from conveyor_engine.execution.models.quantized.layouts import LAYOUTS
from conveyor_engine.fetching import preview
from conveyor_engine.quantization import RESTORED
from conveyor_protocol.failure_reasons import FailureReason
from e2e.hub.server import Hub

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
BERT = {"model_type": "modernbert", "architectures": ["ModernBertModel"]}
UNKNOWN = LLAMA | {"quantization_config": {"quant_method": "aqlm"}}
SPARSE = {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}}
# By name: config.json, the task, and a part of the message.
REJECTED: dict[str, tuple[dict[str, Any], str, str]] = {
    "format": (UNKNOWN, "auto", "(aqlm in config.json)"),
    "layout": (LLAMA | {"quantization_config": SPARSE}, "auto", "sparse weights are not read"),
    "class": ({"model_type": "brand-new"}, "auto", "brand-new"),
    "decoder": ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "auto", "is an encoder-decoder"),
    "layers": ({"model_type": "llama4_text"}, "generate", "layers of type chunked_attention"),
    "rope": (BERT | {"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}}, "auto", "dynamic"),
    "task": (LLAMA, "rerank", "has LlamaForCausalLM); leave `task` out"),
    "speech": ({"model_type": "bert"}, "transcribe", "leave `task` out"),
}
HIDDEN = """
import json, sys
from pathlib import Path
sys.modules["torch"] = None
from conveyor_engine.errors import StartError
from conveyor_engine.execution.models.preview import check
for folder, task in json.load(sys.stdin):
    try:
        check(Path(folder), task)
        print("accepted")
    except StartError as error:
        print(error)
"""


def write_config(folder: Path, config: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))


def test_what_the_small_files_show_is_found_without_torch(tmp_path: Path) -> None:
    for name, (config, _, _) in REJECTED.items():
        write_config(tmp_path / name, config)
    orders = json.dumps([(str(tmp_path / name), task) for name, (_, task, _) in REJECTED.items()])
    found = subprocess.run([sys.executable, "-c", HIDDEN], input=orders, capture_output=True, text=True, check=True)
    for message, (_, _, expected) in zip(found.stdout.splitlines(), REJECTED.values(), strict=True):
        assert expected in message


@pytest.mark.parametrize(("task", "reason"), [("auto", "UNSUPPORTED_MODEL"), ("rerank", "INVALID_CONFIG")])
def test_no_weights_are_downloaded_of_a_model_that_the_engine_rejects(
    task: str, reason: str, fetch_from: Fetch, hub: Hub, root: Path, target: Path
) -> None:
    write_config(root / "org/tiny", UNKNOWN)
    with pytest.raises(ModelError) as raised:
        fetch_from(hub.url, "hf://org/tiny", target, task=task)
    assert raised.value.reason == FailureReason[reason]
    assert str(raised.value).endswith("Its weights were not downloaded")
    assert not [request for request in hub.requests if WEIGHTS in str(request)]


def test_a_model_that_the_engine_runs_is_downloaded_whole(
    fetch_from: Fetch, hub: Hub, root: Path, target: Path
) -> None:
    write_config(root / "org/tiny", LLAMA | {"quantization_config": {"quant_method": "fp8"}})
    fetch_from(hub.url, "hf://org/tiny", target, task="auto")
    assert (target / WEIGHTS).is_file()


def test_another_runtime_decides_itself(fetch_from: Fetch, hub: Hub, root: Path, target: Path) -> None:
    write_config(root / "org/tiny", UNKNOWN)
    fetch_from(hub.url, "hf://org/tiny", target, task=names.NO_TASK)
    assert (target / WEIGHTS).is_file()


def test_a_check_that_fails_itself_rejects_nothing(
    fetch_from: Fetch, hub: Hub, root: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preview, "_PROGRAM", "conveyor_engine.nothing")
    write_config(root / "org/tiny", UNKNOWN)
    fetch_from(hub.url, "hf://org/tiny", target, task="auto")
    assert (target / WEIGHTS).is_file()


def test_every_restored_method_has_layouts() -> None:
    assert LAYOUTS.keys() | {GGUF} == RESTORED
