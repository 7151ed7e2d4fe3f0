"""Tests causal models that rank by their logits: equal to transformers' in every mode, and files that are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.engine.embedding_cores import make_core, run
from tests.engine.scorers import NO, YES, Scored, write_json, write_scorer

from conveyor_engine.errors import ModelError
from conveyor_engine.preview.describe import describe
from conveyor_engine.registry import find_task
from conveyor_engine.wire.classification import ClassifierFacts, read_logits
from conveyor_engine.wire.request import EngineRequest

QUERY = "the quick fox"
DOCUMENTS = ["the fox", "naïve café", "x", "the quick brown fox jumps over the lazy dog", "", "日本語 " * 30]


def scores_of(directory: Path, prompts: list[list[int]], **changes: Any) -> list[float]:
    core = make_core(directory, max_num_batched_tokens=300, **changes)
    for number, prompt in enumerate(prompts):
        core.add_request(EngineRequest(request_id=str(number), prompt_token_ids=prompt))
    outputs = run(core)
    return [read_logits(outputs[str(number)].payload or b"")[0] for number in range(len(prompts))]


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Scored:
    return Scored("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.mark.parametrize("mode", ["none", "static", "dynamic", "continuous"])
def test_scores_are_the_differences_of_both_tokens_in_every_mode(scored: Scored, mode: str) -> None:
    prompts = [scored.token_ids(QUERY, document) for document in DOCUMENTS]
    expected = [scored.logit(prompt) for prompt in prompts]
    assert max(expected) - min(expected) > 0.1, "the comparison could fail"
    assert scores_of(scored.directory, prompts, batching_mode=mode) == pytest.approx(expected, abs=1e-4)


def test_half_precision_gives_nearly_the_same_scores(scored: Scored) -> None:
    prompts = [scored.token_ids(QUERY, document) for document in DOCUMENTS]
    expected = [scored.logit(prompt) for prompt in prompts]
    assert scores_of(scored.directory, prompts, dtype="bfloat16") == pytest.approx(expected, abs=0.2)


@pytest.mark.parametrize(
    "changes", [{"final_logit_softcapping": 2.0}, {"tie_word_embeddings": False}], ids=["capped", "untied"]
)
def test_one_token_scores_as_bge_reranker_gemma_does(tmp_path: Path, changes: dict[str, Any]) -> None:
    """The model's own code computes the logits, which Gemma 2 caps."""
    template = "A: {{ messages[1].content }}\nB: {{ messages[2].content }}\n{{ messages[0].content }}"
    scored = Scored("gemma2", tmp_path, tokens=(YES, None), template=template, **changes)
    prompts = [scored.token_ids(QUERY, document) for document in DOCUMENTS]
    expected = [scored.logit(prompt) for prompt in prompts]
    assert scores_of(tmp_path, prompts) == pytest.approx(expected, abs=1e-4)
    facts = ClassifierFacts.read(make_core(tmp_path).facts)
    assert facts.activation == "none"


def test_the_files_make_it_a_model_that_ranks(scored: Scored) -> None:
    assert find_task("auto", scored.directory) == "rerank"
    runs, lines = describe(str(scored.directory))
    assert runs, lines
    assert lines[0].startswith("runs     Qwen3ForCausalLM, task rerank")
    facts = ClassifierFacts.read(make_core(scored.directory).facts)
    assert facts.template is not None
    assert (facts.activation, facts.template.add_generation_prompt) == ("sigmoid", True)


@pytest.mark.parametrize(
    ("file", "content", "sentence"),
    [
        ("1_LogitScore/config.json", {"true_token_id": 10**6, "false_token_id": NO}, "names tokens that the model"),
        ("1_LogitScore/config.json", {"true_token_id": None, "false_token_id": NO}, "names tokens that the model"),
        ("1_LogitScore/config.json", {"true_token_id": True}, "names tokens that the model"),
        ("1_LogitScore/config.json", {}, "names tokens that the model"),
        ("chat_template.jinja", "{{ messages[0]['content'] }}", "roles 'query' and 'document'"),
        ("chat_template.jinja", "{{ raise_exception('not me') }}", "does not render a query and a document.*not me"),
        ("chat_template.jinja", "{% for i in range(10**12) %}{% endfor %}", "does not render|CPU time"),
        ("sentence_bert_config.json", {"processing_kwargs": {"chat_template": 7}}, "chat_template in .* not an object"),
        (
            "sentence_bert_config.json",
            {"processing_kwargs": {"chat_template": {"tools": []}}},
            "chat_template_kwargs.tools",
        ),
        ("config_sentence_transformers.json", {"default_prompt_name": "x"}, "no usable text for its default prompt"),
        ("config_sentence_transformers.json", {"activation_fn": "os.system"}, "the activation os.system"),
    ],
)
def test_files_that_ask_for_another_score_are_refused(tmp_path: Path, file: str, content: Any, sentence: str) -> None:
    write_scorer("qwen3", tmp_path)
    (tmp_path / file).write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ModelError, match=sentence):
        make_core(tmp_path)


def test_a_score_in_another_folder_is_refused(tmp_path: Path) -> None:
    write_scorer("qwen3", tmp_path)
    modules = json.loads((tmp_path / "modules.json").read_text())
    modules[1]["path"] = "../1_LogitScore"
    write_json(tmp_path / "modules.json", modules)
    with pytest.raises(ModelError, match=r"needs 1_LogitScore/config\.json"):
        make_core(tmp_path)
