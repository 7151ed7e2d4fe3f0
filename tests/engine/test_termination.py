"""What a container leaves behind: how it ended, and what a fetch found."""

import json
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from conveyor_engine.__main__ import main
from conveyor_engine.termination import find_context_length, write_facts, write_termination_message
from conveyor_protocol.failure_reasons import FailureReason


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ('{"max_position_embeddings": 1024}', 1024),
        ('{"n_positions": 512}', 512),
        ('{"model_type": "xlm-roberta", "max_position_embeddings": 514, "pad_token_id": 1}', 512),
        ('{"model_type": "roberta", "max_position_embeddings": 514}', 512),
        ('{"model_type": ["roberta"], "max_position_embeddings": 514}', 514),
        ('{"model_type": "bert", "max_position_embeddings": 512, "pad_token_id": 0}', 512),
        ('{"text_config": {"max_position_embeddings": 131072}, "max_position_embeddings": 1}', 131072),
        ('{"max_position_embeddings": "many"}', None),
        ('{"max_position_embeddings": true}', None),
        ('{"text_config": []}', None),
        ("[" * 100_000, None),
        ("{}", None),
        ("no JSON", None),
    ],
)
def test_the_longest_context_is_what_the_config_says(tmp_path: Path, config: str, length: int | None) -> None:
    (tmp_path / "config.json").write_text(config)
    assert find_context_length(tmp_path) == length


def test_a_model_that_embeds_may_have_been_made_for_less(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 512}')
    for limits, length in (('{"max_seq_length": 256}', 256), ('{"max_seq_length": null}', 512), ("[]", 512)):
        (tmp_path / "sentence_bert_config.json").write_text(limits)
        assert find_context_length(tmp_path) == length


@pytest.mark.parametrize("character", ["a", '"', "\\", "\n", "模", "😀", "\ud800"])
def test_a_long_message_is_kept_by_kubernetes_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, character: str
) -> None:
    log = tmp_path / "termination-log"
    monkeypatch.setenv("TERMINATION_LOG", str(log))
    write_termination_message(FailureReason.UNSUPPORTED_MODEL, "It is " + character * 5000)
    assert log.stat().st_size <= 4096
    assert json.loads(log.read_bytes())["message"].startswith("It is")


def test_a_fetch_says_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "termination-log"
    monkeypatch.setenv("TERMINATION_LOG", str(log))
    model = tmp_path / "model"
    model.mkdir()
    for config, facts in (
        ({"max_position_embeddings": 1024}, {"contextLength": 1024, "task": "generate"}),
        ({"architectures": ["BertModel"]}, {"task": "embed"}),
        ({"architectures": ["BertForSequenceClassification"], "id2label": {"0": "x"}}, {"task": "rerank"}),
        ({"architectures": ["BertForSequenceClassification"]}, {"task": "classify"}),
        ({"architectures": ["BertForTokenClassification"]}, {"task": "classify"}),
        (
            {"quantization_config": {"quant_method": "awq", "bits": 4}},
            {"task": "generate", "quantization": "awq 4 bits"},
        ),
    ):
        (model / "config.json").write_text(json.dumps(config))
        assert main(["fetch", "--uri", "pvc://models/demo", "--target", str(model)]) == 0
        assert json.loads(log.read_text()) == facts
    assert main(["fetch", "--uri", "pvc://models/demo", "--target", str(tmp_path / "none")]) == 1
    assert json.loads(log.read_text())["reason"] == "ModelNotFound"


@pytest.mark.parametrize(
    ("files", "index"),
    [
        (["model.safetensors"], None),
        (["unet/model.safetensors"], None),
        (["model.safetensors", "consolidated.safetensors"], None),
        (["part.safetensors", "other.safetensors"], {"a": "part.safetensors", "b": "part.safetensors"}),
    ],
)
def test_a_fetch_reports_the_bytes_of_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: list[str], index: dict[str, str] | None
) -> None:
    monkeypatch.setenv("TERMINATION_LOG", str(tmp_path / "log"))
    model = tmp_path / "model"
    for name in files:
        (model / name).parent.mkdir(parents=True, exist_ok=True)
        save_file({"a": torch.zeros(100)}, model / name)
    (model / "config.json").write_text("{}")
    if index is not None:
        (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    write_facts(model)
    assert json.loads((tmp_path / "log").read_text())["weightBytes"] == (model / files[0]).stat().st_size


def test_who_calls_main_keeps_its_own_handlers_of_signals() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert main(["version"]) == 0
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_check_parses_the_configuration_and_needs_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "termination-log"
    monkeypatch.setenv("TERMINATION_LOG", str(log))
    file = tmp_path / "engine.yaml"
    file.write_text("model: /models/nowhere\nmax_num_seqs: 4\n")
    assert main(["check", "--config", str(file)]) == 0
    assert not log.exists()
    file.write_text("model: /models/nowhere\nmax_seqs: 4\n")
    assert main(["check", "--config", str(file)]) == 2
    assert json.loads(log.read_bytes())["reason"] == "InvalidConfig"
    assert "max_seqs" in json.loads(log.read_bytes())["message"]
