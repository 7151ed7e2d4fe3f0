"""Tests that logits equal transformers' within 1e-4 in float32, in every batch and mode, for each family of models.

The mutation tests at the end show that the comparison can fail.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.classifiers import (
    KINDS,
    LENGTHS,
    PROMPTS,
    add,
    classify,
    logits_of,
    save_classifier,
    split_types,
)
from tests.engine.embedding_cores import distance, make_core, run
from tests.engine.encoders import CONTEXT_TOKENS, save_encoder
from tests.engine.tiny_models import save_tiny_model

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.errors import ConfigError, ModelError
from conveyor_engine.execution.models import classifier_files, head
from conveyor_engine.execution.runners.classify import ClassifyRunner
from conveyor_engine.loop.core import EngineCore
from conveyor_engine.wire.classification import ClassifierFacts

MODES = ("none", "static", "dynamic", "continuous")
HEADS: dict[str, dict[str, Any]] = {
    "ranks": {"num_labels": 1},
    "classifies": {"num_labels": 3},
    "classifies tokens": {"num_labels": 5, "per_token": True},
}


class Classifier:
    """A tiny model, and transformers' logits of all prompts."""

    def __init__(self, kind: str, directory: Path, **changes: Any) -> None:
        self.directory = directory
        self.model = save_classifier(kind, directory, **changes)
        self.types = [split_types(self.model, prompt) for prompt in PROMPTS]
        scores = [classify(self.model, *both) for both in zip(PROMPTS, self.types, strict=True)]
        self.logits = [find_likeliest(each) if each.dim() > 1 else each for each in scores]

    def make_core(self, **changes: Any) -> EngineCore:
        return make_core(self.directory, **changes)

    def answers(self, core: EngineCore) -> list[torch.Tensor]:
        for number, (prompt, types) in enumerate(zip(PROMPTS, self.types, strict=True)):
            add(core, str(number), prompt, types)
        outputs = run(core)
        return [logits_of(outputs[str(number)]) for number in range(len(PROMPTS))]


def find_likeliest(logits: torch.Tensor) -> torch.Tensor:
    """Label, logit and probability of each token."""
    best = [(row.argmax(), row.max(), row.softmax(dim=0).max()) for row in logits]
    return torch.tensor([float(number) for each in best for number in each])


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Classifier]:
    made: dict[tuple[str, str], Classifier] = {}

    def get(kind: str, does: str) -> Classifier:
        if (kind, does) not in made:
            made[kind, does] = Classifier(kind, tmp_path_factory.mktemp(kind), **HEADS[does])
        return made[kind, does]

    return get


GetClassifier = Callable[[str, str], Classifier]


@pytest.mark.parametrize("does", HEADS)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers_and_of_the_token_that_the_head_reads(
    classifier: GetClassifier, kind: str, does: str
) -> None:
    ref = classifier(kind, does)
    core = ref.make_core()
    assert distance(ref.answers(core), ref.logits) < 1e-4
    assert isinstance(core.executor, ClassifyRunner)
    assert core.executor._place == ("each" if does == "classifies tokens" else KINDS[kind])


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_the_logits_of_transformers(classifier: GetClassifier, mode: str, backend: str) -> None:
    ref = classifier("bert", "ranks")
    core = ref.make_core(batching_mode=mode, attention_backend=backend)
    assert distance(ref.answers(core), ref.logits) < 1e-4
    stats = core.stats()
    assert (stats.padding_tokens, stats.kv_cache_usage, stats.generation_tokens) == (0, 0.0, 0)
    assert stats.prompt_tokens == sum(LENGTHS)


@pytest.mark.parametrize("does", HEADS)
def test_logits_are_the_same_alone_and_among_others(classifier: GetClassifier, does: str) -> None:
    ref = classifier("bert", does)
    alone = ref.answers(ref.make_core(batching_mode="none"))
    for max_num_seqs in (2, 7, 10):
        core = ref.make_core(max_num_seqs=max_num_seqs, max_num_batched_tokens=1024)
        assert distance(ref.answers(core), alone) < 1e-5


def test_a_head_that_reads_the_first_token_is_not_taken_for_one_of_the_mean(tmp_path: Path) -> None:
    ref = Classifier("modernbert", tmp_path, num_labels=1, classifier_pooling="cls")
    core = ref.make_core()
    assert distance(ref.answers(core), ref.logits) < 1e-4
    assert isinstance(core.executor, ClassifyRunner)
    assert core.executor._place == "first"


def test_a_model_without_a_token_for_padding_runs_in_batches(tmp_path: Path) -> None:
    """Transformers' own class refuses that."""
    ref = Classifier("llama", tmp_path, pad_token_id=None)
    assert distance(ref.answers(ref.make_core(max_num_batched_tokens=200)), ref.logits) < 1e-4


def test_half_precision_is_not_taken_for_another_head(tmp_path: Path) -> None:
    for kind in set(KINDS) - {"deberta"}:
        types = {"layer_types": ["full_attention", "sliding_attention"] * 6} if kind == "modernbert" else {}
        save_classifier(kind, tmp_path / kind, num_hidden_layers=12, **types)
        assert make_core(tmp_path / kind, dtype="bfloat16").executor is not None


def test_deberta_v1_runs_in_float32(tmp_path: Path) -> None:
    """Transformers' class adds numbers of both types in other ones."""
    save_classifier("deberta", tmp_path)
    assert make_core(tmp_path, dtype="auto").facts.dtype == "float32"
    with pytest.raises(ConfigError, match="DeBERTa v1 runs in float32 only"):
        make_core(tmp_path, dtype="bfloat16")


def test_warm_up_computes_the_largest_batch_and_the_longest_prompt(classifier: GetClassifier) -> None:
    core = classifier("bert", "ranks").make_core(warmup=True)
    assert core.stats().num_steps == 0
    sizes: list[list[int]] = []
    begin = core.executor.begin
    core.executor.begin = lambda plan: (sizes.append(plan.num_tokens), begin(plan))[1]  # type: ignore[method-assign]
    core._warm_up(EngineConfig(model="-"))
    assert sizes == [[12] * 4, [CONTEXT_TOKENS]]


def test_logits_that_are_not_finite_are_an_error_of_their_request_alone(
    classifier: GetClassifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = classifier("bert", "classifies").make_core(max_num_batched_tokens=400)
    assert isinstance(core.executor, ClassifyRunner)
    compute = core.executor._compute

    def damage(prompts: Any) -> list[torch.Tensor]:
        computed = compute(prompts)
        computed[0][1, 2] = float("nan")
        return computed

    monkeypatch.setattr(core.executor, "_compute", damage)
    for number in range(3):
        add(core, str(number), PROMPTS[number], [0])
    outputs = run(core)
    assert [outputs[name].finish_reason for name in "012"] == ["stop", "error", "stop"]
    assert "not finite" in (outputs["1"].message or "")


def facts_of(core: EngineCore) -> ClassifierFacts:
    return ClassifierFacts.read(core.facts)


@pytest.mark.parametrize(
    ("changes", "task", "activation"),
    [
        ({"num_labels": 1}, "rerank", "sigmoid"),
        (
            {"num_labels": 1, "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
            "rerank",
            "none",
        ),
        ({"num_labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.Identity"}}, "rerank", "none"),
        ({"num_labels": 1, "task": "classify"}, "classify", "sigmoid"),
        ({"num_labels": 1, "task": "classify", "problem_type": "regression"}, "classify", "none"),
        ({"num_labels": 3}, "classify", "softmax"),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, "classify", "sigmoid"),
        ({"num_labels": 3, "problem_type": "single_label_classification"}, "classify", "softmax"),
        ({"num_labels": 3, "problem_type": "regression"}, "classify", "none"),
        ({"num_labels": 3, "per_token": True}, "classify", "softmax"),
    ],
    ids=str,
)
def test_what_scores_are_made_by_is_read_from_the_model_s_files(
    tmp_path: Path, changes: dict[str, Any], task: str, activation: str
) -> None:
    given_task = changes.pop("task", "auto")
    save_classifier("bert", tmp_path, **changes)
    core = make_core(tmp_path, task=given_task)
    assert (core.facts.task, facts_of(core).activation) == (task, activation)
    assert facts_of(core).num_token_types == 2


def test_a_cross_encoder_that_sentence_transformers_saved_is_no_embedder(tmp_path: Path) -> None:
    save_classifier("bert", tmp_path, 1)
    (tmp_path / "modules.json").write_text('[{"idx": 0, "name": "0", "path": "", "type": "..models.Transformer"}]')
    settings = tmp_path / classifier_files.SENTENCE_SETTINGS
    settings.write_text(json.dumps({"activation_fn": "torch.nn.modules.linear.Identity", "default_prompt_name": None}))
    core = make_core(tmp_path)
    assert (core.facts.task, facts_of(core).activation) == ("rerank", "none")
    settings.write_text(json.dumps({"default_prompt_name": "query"}))
    with pytest.raises(ModelError, match="puts a prompt before each text"):
        make_core(tmp_path)


def test_labels_are_those_of_the_model(tmp_path: Path) -> None:
    save_classifier("bert", tmp_path, id2label={0: "sad", 1: "so so", 2: "glad"})
    assert facts_of(make_core(tmp_path)).labels == ("sad", "so so", "glad")


@pytest.mark.parametrize(
    ("save", "task", "sentence"),
    [
        (
            lambda to: save_classifier("bert", to),
            "rerank",
            "the model classifies texts .*BertForSequenceClassification",
        ),
        (lambda to: save_classifier("bert", to), "generate", "the model classifies texts .*set `task: classify`"),
        (lambda to: save_classifier("bert", to, 1), "embed", "the model ranks documents"),
        (lambda to: save_classifier("bert", to, 1, per_token=True), "rerank", "the model classifies texts"),
        (lambda to: save_encoder("bert", to), "classify", "the model makes embeddings .*BertModel"),
        (lambda to: save_tiny_model("llama", to), "rerank", "the model generates text .*LlamaForCausalLM"),
    ],
)
def test_a_task_that_is_not_the_model_s_is_refused_with_what_it_is(
    tmp_path: Path, save: Callable[[Path], object], task: str, sentence: str
) -> None:
    save(tmp_path)
    with pytest.raises(ConfigError, match=sentence):
        make_core(tmp_path, task=task)


def test_settings_of_other_tasks_are_refused(classifier: GetClassifier) -> None:
    with pytest.raises(ConfigError, match="reads a KV cache"):
        classifier("bert", "ranks").make_core(attention_backend="native")


def test_scores_that_are_made_in_an_unknown_way_are_refused(tmp_path: Path) -> None:
    save_classifier("bert", tmp_path, 1, sentence_transformers={"activation_fn": "os.system"})
    with pytest.raises(ModelError, match=r"activation os\.system; this engine has Sigmoid and Identity"):
        make_core(tmp_path)


def test_a_head_that_reads_several_tokens_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.xlm_roberta.modeling_xlm_roberta import XLMRobertaClassificationHead

    forward = XLMRobertaClassificationHead.forward
    monkeypatch.setattr(
        XLMRobertaClassificationHead, "forward", lambda self, hidden: forward(self, hidden.amax(1, keepdim=True))
    )
    save_classifier("xlm-roberta", tmp_path)
    with pytest.raises(ModelError, match="several tokens of a sequence"):
        make_core(tmp_path)


def test_more_labels_than_an_answer_can_have_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_classifier("bert", tmp_path, 3)
    monkeypatch.setattr(classifier_files, "LABELS_MAX", 2)
    with pytest.raises(ModelError, match="bert has 3 labels, more than the limit of 2"):
        make_core(tmp_path)


def test_a_token_of_the_wrong_place_is_found_out(classifier: GetClassifier) -> None:
    ref = classifier("bert", "ranks")
    core = ref.make_core()
    assert isinstance(core.executor, ClassifyRunner)
    core.executor._place = "last"
    assert distance(ref.answers(core), ref.logits) > 1e-2


def test_lost_types_of_tokens_are_found_out(classifier: GetClassifier) -> None:
    ref = classifier("bert", "ranks")
    core = ref.make_core()
    assert isinstance(core.executor, ClassifyRunner)
    core.executor._reads_types = False
    assert distance(ref.answers(core), ref.logits) > 1e-2


def test_a_pooler_that_is_left_out_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_classifier("bert", tmp_path)
    build = head._Given.__init__
    monkeypatch.setattr(head._Given, "__init__", lambda self, pooler: build(self, lambda hidden: hidden[:, 0]))
    with pytest.raises(ModelError, match="several tokens"):
        make_core(tmp_path)
