"""Checks that a model's files set its task, its pooling and its input length, and that other settings are rejected."""

import json
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tests.engine.chat_model import write_tokenizer
from tests.engine.embedding_cores import PROMPTS, answers, distance, make_core
from tests.engine.encoders import CONTEXT_TOKENS, SIZE, embed, save_encoder
from tests.engine.encoders import write_sentence_files as write_files
from tokenizers import Tokenizer, normalizers
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from conveyor_engine.errors import MESSAGE_BYTES_MAX, ConfigError, ModelError
from conveyor_engine.registry import find_task
from conveyor_engine.tasks.embed.execution.files import Instructions, read_instructions, read_pooling
from conveyor_engine.tasks.embed.facts import EmbeddingFacts


@pytest.mark.parametrize(("kind", "mode"), [("bert", "pooling_mode_mean_tokens"), ("qwen3", "pooling_mode_lasttoken")])
def test_a_model_that_says_nothing_is_pooled_by_its_kind(tmp_path: Path, kind: str, mode: str) -> None:
    model = save_encoder(kind, tmp_path)
    core = make_core(tmp_path, task="embed")
    expected = [embed(model, prompt, mode, normalizes=True) for prompt in PROMPTS]
    assert distance(answers(core, PROMPTS), expected) < 1e-4


@pytest.mark.parametrize("mode", ["pooling_mode_cls_token", "pooling_mode_lasttoken", "pooling_mode_mean_tokens"])
def test_a_model_is_pooled_as_its_files_say(tmp_path: Path, mode: str) -> None:
    model = save_encoder("bert", tmp_path)
    write_files(tmp_path, mode, normalizes=False)
    expected = [embed(model, prompt, mode, normalizes=False) for prompt in PROMPTS]
    assert distance(answers(make_core(tmp_path), PROMPTS), expected) < 1e-4


def test_the_facts_describe_the_model(tmp_path: Path) -> None:
    save_encoder("xlm-roberta", tmp_path, matryoshka_dimensions=[16, 8] * 1000)
    facts = make_core(tmp_path).facts
    assert (facts.task, facts.num_kv_blocks, facts.max_model_len) == ("embed", 0, CONTEXT_TOKENS)
    embedding = EmbeddingFacts.read(facts)
    assert (embedding.size, embedding.matryoshka_dimensions) == (SIZE, (8, 16))
    assert [n for n in range(1, 100) if embedding.allows(n)] == [8, 16, SIZE]
    write_files(tmp_path, "pooling_mode_cls_token", normalizes=True, max_seq_length=32)
    assert make_core(tmp_path).facts.max_model_len == 32
    with pytest.raises(ConfigError, match="made for at most 32 tokens"):
        make_core(tmp_path, max_model_len=33)


@pytest.mark.parametrize(
    ("architectures", "has_files", "task"),
    [
        (["BertModel"], False, "embed"),
        (["BertForMaskedLM"], False, "embed"),
        (["Qwen3ForCausalLM"], True, "embed"),
        (["BertLMHeadModel"], False, "generate"),
        (["Qwen3ForCausalLM"], False, "generate"),
        (None, False, "generate"),
        ("BertModel", False, "generate"),
    ],
)
def test_the_models_files_say_what_its_task_is(tmp_path: Path, architectures: Any, has_files: bool, task: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": architectures}))
    if has_files:
        write_files(tmp_path, "pooling_mode_lasttoken", normalizes=True)
    assert find_task("auto", tmp_path) == task
    assert find_task("embed", tmp_path) == "embed"
    assert find_task("generate", tmp_path) == "generate"


@pytest.mark.parametrize(
    ("file", "content", "sentence"),
    [
        ("modules.json", [{"type": "a.Transformer"}, {"type": "a.Pooling", "path": "1_Pooling"}, {"type": "a.LSTM"}],
         "the steps Transformer, Pooling, LSTM"),
        ("modules.json", [{"type": "a.Transformer", "path": "0_T"}, {"type": "a.Pooling"}], "Transformer .at the root"),
        ("modules.json", {}, "not a JSON list"),
        ("modules.json", [{"type": "a.Transformer"}, {"type": "a.Pooling", "path": "../1_Pooling"}],
         "'../1_Pooling', which is not a folder name"),
        ("modules.json", [{"type": "a.Transformer"}, {"type": "a.Pooling", "path": "a" * 300}], "not a folder name"),
        ("modules.json", [{"type": "a.Transformer"}, {"type": "a.Pooling", "path": "2_Pooling"}], "is missing"),
        ("modules.json", [{"type": "\ud800\n\x1b[31m"}], "the steps .31m;"),
        ("modules.json", [{"type": "a." + "x" * 10**6}], "the steps xxx"),
        ("modules.json", None, "not a JSON list"),
        ("modules.json", [7], "an entry that is not an object"),
        ("sentence_bert_config.json", [], "not a JSON object"),
        ("1_Pooling/config.json", {f"pooling_mode_{n}": True for n in range(10**4)}, "pooling_mode_0 and"),
        ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, "pooling pooling_mode_max_tokens"),
        ("1_Pooling/config.json", {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "mean_tokens"),
        ("1_Pooling/config.json", {"pooling_mode": "weightedmean"}, "pooling weightedmean"),
        ("1_Pooling/config.json", {}, "pooling .none."),
        ("1_Pooling/config.json", [], "not a JSON object"),
    ],
)  # fmt: skip
def test_files_that_request_another_vector_are_refused(tmp_path: Path, file: str, content: Any, sentence: str) -> None:
    save_encoder("bert", tmp_path)
    write_files(tmp_path, "pooling_mode_mean_tokens", normalizes=True)
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(ModelError, match=sentence) as caught:
        make_core(tmp_path)
    assert caught.value.reason == "UnsupportedModel"
    message = str(caught.value)
    assert message.isprintable()
    assert len(message.encode()) <= MESSAGE_BYTES_MAX


@pytest.mark.parametrize("file", ["modules.json", "1_Pooling/config.json", "sentence_bert_config.json"])
def test_a_file_that_is_far_too_long_is_not_read(tmp_path: Path, file: str) -> None:
    write_files(tmp_path, "pooling_mode_mean_tokens", normalizes=True)
    os.truncate(tmp_path / file, 1 << 30)
    with pytest.raises(ModelError, match=f"{file} cannot be read: it has 1073741824 bytes"):
        read_pooling(tmp_path)


def test_the_newer_word_for_a_pooling_is_understood(tmp_path: Path) -> None:
    model = save_encoder("bert", tmp_path)
    write_files(tmp_path, "none", normalizes=True)
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode": "lasttoken"}')
    expected = embed(model, PROMPTS[1], "pooling_mode_lasttoken", normalizes=True)
    assert distance(answers(make_core(tmp_path), PROMPTS[1:2]), [expected]) < 1e-4


@pytest.mark.parametrize(("kind", "auto_class"), [("qwen3", AutoModelForCausalLM), ("bert", AutoModelForMaskedLM)])
def test_a_checkpoint_with_a_head_embeds_as_without_it(tmp_path: Path, kind: str, auto_class: Any) -> None:
    """The checkpoints of Qwen3-Embedding and BERT have such a head."""
    model = save_encoder(kind, tmp_path, auto_class)
    write_files(tmp_path, "pooling_mode_lasttoken", normalizes=True)
    expected = [embed(model.base_model, prompt, "pooling_mode_lasttoken", normalizes=True) for prompt in PROMPTS]
    assert distance(answers(make_core(tmp_path), PROMPTS), expected) < 1e-4


def test_weights_that_are_missing_are_refused_but_those_of_the_pooler(tmp_path: Path) -> None:
    save_encoder("bert", tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    assert any(name.startswith("pooler.") for name in weights)
    save_file({name: w for name, w in weights.items() if not name.startswith("pooler.")}, file, {"format": "pt"})
    make_core(tmp_path)
    del weights["encoder.layer.1.output.dense.weight"]
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(ModelError, match="1 missing keys, first encoder"):
        make_core(tmp_path)


@pytest.mark.parametrize("lowers", [True, False])
def test_lower_case_is_the_tokenizer_s_work(tmp_path: Path, lowers: bool) -> None:
    """Many models with uncased tokenizers request lower case again."""
    write_files(tmp_path, "pooling_mode_mean_tokens", normalizes=True)
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 32, "do_lower_case": true}')
    write_tokenizer(tmp_path)
    path = str(tmp_path / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    if lowers:
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.save(path)
    with nullcontext() if lowers else pytest.raises(ModelError, match="asks for lower case"):
        assert read_pooling(tmp_path).max_seq_length == 32


def write_settings(folder: Path, **settings: object) -> None:
    write_files(folder, "pooling_mode_mean_tokens", normalizes=True)
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))


def test_instructions_are_read_by_name_and_a_model_without_them_has_none(tmp_path: Path) -> None:
    assert read_instructions(tmp_path) == Instructions({}, "")
    write_settings(tmp_path, prompts={"query": "find: "}, default_prompt_name=None)
    assert read_instructions(tmp_path) == Instructions({"query": "find: "}, "")
    write_settings(tmp_path, prompts={"query": "find: "}, default_prompt_name="query")
    assert read_instructions(tmp_path).default == "query"


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"prompts": ["a"]}, "not an object of texts"),
        ({"prompts": {"a": 5}}, "not an object of texts"),
        ({"prompts": {"a": "b"}, "default_prompt_name": "c"}, "the default prompt 'c'"),
        ({"prompts": {"a": "b" * 5000}}, "4096 characters"),
        ({"prompts": {str(n): "b" for n in range(300)}}, "256 prompts"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_instructions_that_cannot_be_used_are_refused(
    tmp_path: Path, settings: dict[str, object], problem: str
) -> None:
    write_settings(tmp_path, **settings)
    with pytest.raises(ModelError, match=problem):
        read_instructions(tmp_path)


def test_a_pooling_that_leaves_instructions_out_is_refused_where_there_are_some(tmp_path: Path) -> None:
    for prompts in ({"query": "find: "}, {"query": ""}):
        write_settings(tmp_path, prompts=prompts)
        path = tmp_path / "1_Pooling" / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "include_prompt": False}))
        if prompts["query"]:
            with pytest.raises(ModelError, match="include_prompt"):
                read_instructions(tmp_path)
        else:
            assert read_instructions(tmp_path).texts == prompts
