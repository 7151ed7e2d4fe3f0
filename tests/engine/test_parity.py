"""Greedy tokens equal those of transformers (`generate`, fp32, batch 1, eager) in every mode, preempted or not.

What holds for every kind of model, whatever computes it, is in test_kinds.

The mutation tests at the end show that the comparison can fail: each takes one feature of attention away.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.engine.references import MAX_TOKENS, SHARED_PREFIX, Reference, add, answers, run, tokens_of
from tests.engine.tiny_models import KINDS, OTHER_KINDS, WITH_STATES

from conveyor_engine.execution.attention.backend import AttentionMetadata, AttentionSpec, Exact
from conveyor_engine.execution.attention.torch_paged import TorchPaged
from conveyor_engine.execution.batch import Batch, build_batch
from conveyor_engine.execution.rows import Rows
from conveyor_engine.tasks.generate.execution import runner
from conveyor_engine.wire.request import FinishReason

GetReference = Callable[[str], Reference]
CLOSED_MODES = ("none", "static", "dynamic")
# (kind, backend), and the same with modes: each kind once, every mode, and what runs where nothing is said.
BACKENDS = [*((kind, "torch") for kind in KINDS), ("llama", "auto"), ("gemma2", "auto")]
EACH_IN_ONE_MODE = [
    pytest.param(kind, mode, marks=() if kind == "llama" or mode == "static" else pytest.mark.slow)
    for kind in KINDS
    for mode in CLOSED_MODES
]
SITUATIONS = [*(("llama", "torch", mode) for mode in CLOSED_MODES), *((*both, "continuous") for both in BACKENDS)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_references_say_many_different_things(reference: GetReference, kind: str) -> None:
    assert len({token for answer in reference(kind).answers for token in answer}) >= 20
    assert all(len(set(answer)) > 5 for answer in reference(kind).answers)


@pytest.mark.parametrize(("kind", "mode"), EACH_IN_ONE_MODE)
def test_every_other_mode_gives_the_tokens_of_generate(reference: GetReference, kind: str, mode: str) -> None:
    ref = reference(kind)
    assert answers(ref.make_core(batching_mode=mode), ref.prompts) == ref.answers


@pytest.mark.parametrize("kind", KINDS)
def test_whole_prompts_in_one_step_give_them_too(reference: GetReference, kind: str) -> None:
    ref = reference(kind)
    core = ref.make_core(max_num_batched_tokens=512, max_num_seqs=8)
    assert answers(core, ref.prompts) == ref.answers
    assert core.stats().num_steps == MAX_TOKENS


@pytest.mark.parametrize(("padding", "dummies"), [(None, True), ("real", True), ("none", False)])
def test_static_batches_padded_or_packed_give_them_too(
    reference: GetReference, padding: str | None, dummies: bool
) -> None:
    ref = reference("llama")
    core = ref.make_core(batching_mode="static", padding=padding, max_num_batched_tokens=1024)
    assert answers(core, ref.prompts) == ref.answers
    assert bool(core.stats().padding_tokens) == dummies


@pytest.mark.parametrize("mode", ["static", "dynamic"])
def test_requests_preempted_from_a_closed_batch_give_them_too(reference: GetReference, mode: str) -> None:
    ref = reference("llama")
    core = ref.make_core(batching_mode=mode, num_kv_blocks=8, max_num_batched_tokens=512)
    core.scheduler._outputs.expected_output_tokens = 1.0
    assert answers(core, ref.prompts) == ref.answers
    assert core.stats().num_preemptions > 0


@pytest.mark.parametrize(
    ("kind", "backend", "prefix_caching"),
    [
        *((*both, True) for both in BACKENDS),
        *(pytest.param(*both, False, marks=() if both[0] == "llama" else pytest.mark.slow) for both in BACKENDS),
    ],
)
def test_preempted_requests_give_them_too(
    reference: GetReference, kind: str, backend: str, prefix_caching: bool
) -> None:
    ref = reference(kind)
    core = ref.make_core(num_kv_blocks=8, prefix_caching=prefix_caching, attention_backend=backend)
    assert answers(core, ref.prompts) == ref.answers
    assert core.stats().num_preemptions > 0


@pytest.mark.parametrize(
    ("kind", "backend", "mode"), [situation for situation in SITUATIONS if situation[0] not in WITH_STATES]
)
def test_requests_that_share_a_prefix_give_them_too(
    reference: GetReference, kind: str, backend: str, mode: str
) -> None:
    ref = reference(kind)
    padding = "none" if mode == "static" else None  # a padded tensor shares nothing
    core = ref.make_core(max_num_batched_tokens=512, attention_backend=backend, batching_mode=mode, padding=padding)
    assert answers(core, ref.prompts[4:]) == ref.answers[4:]
    assert core.stats().prefix_cache_hit_tokens == SHARED_PREFIX // 16 * 16, "shared, within one step if batched"
    assert answers(core, ref.prompts[4:]) == ref.answers[4:]
    assert core.stats().prefix_cache_hit_tokens > SHARED_PREFIX, "and found again later"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind in WITH_STATES])
def test_rows_with_states_share_no_prefix(reference: GetReference, kind: str) -> None:
    ref = reference(kind)
    core = ref.make_core(max_num_batched_tokens=512)
    for _ in range(2):
        assert answers(core, ref.prompts[4:]) == ref.answers[4:]
    assert core.stats().prefix_cache_query_tokens == core.stats().prefix_cache_hit_tokens == 0


@pytest.mark.parametrize("mode", [*CLOSED_MODES, "continuous"])
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind in ("lfm2", "nemotron_h") else pytest.mark.slow)
     for kind in OTHER_KINDS if kind in WITH_STATES],
)  # fmt: skip
def test_rows_with_states_give_them_in_every_mode_and_preempted(reference: GetReference, kind: str, mode: str) -> None:
    ref = reference(kind)
    budget = 13 if mode == "continuous" else 512
    core = ref.make_core(batching_mode=mode, num_kv_blocks=8, max_num_batched_tokens=budget)
    core.scheduler._outputs.expected_output_tokens = 1.0
    assert answers(core, ref.prompts) == ref.answers
    assert core.stats().num_preemptions > 0 or mode == "none"


@pytest.mark.parametrize(("kind", "backend", "mode"), SITUATIONS)
def test_aborts_in_between_change_nothing_for_the_others(
    reference: GetReference, kind: str, backend: str, mode: str
) -> None:
    ref = reference(kind)
    core = ref.make_core(num_kv_blocks=12, attention_backend=backend, batching_mode=mode)
    for number, prompt in enumerate(ref.prompts):
        add(core, f"gone {number}", prompt[: 10 + number])
        add(core, str(number), prompt)
    answers: dict[str, list[int]] = {}
    reasons: dict[str, FinishReason] = {}
    for step in range(2_000):
        if step % 5 == 4:
            core.abort(f"gone {step // 5}")
        for output in core.step(0.0):
            answers[output.request_id] = answers.get(output.request_id, []) + output.new_token_ids
            if output.finish_reason is not None:
                reasons[output.request_id] = output.finish_reason
        if not core.has_unfinished():
            break
    assert [answers[str(number)] for number in range(len(ref.prompts))] == ref.answers
    assert FinishReason.ABORT in reasons.values()
    assert core.stats().kv_cache_usage == 0.0


def test_an_end_of_sequence_token_of_the_generation_config_stops_where_generate_stops(
    reference: GetReference, tmp_path: Any
) -> None:
    ref = reference("qwen3")
    eos = ref.answers[1][9]
    for file in ref.directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": [{eos}, 198]}}')
    core = ref.make_core(model=str(tmp_path))
    assert core.facts.eos_token_ids == (eos, 198)
    add(core, "a", ref.prompts[1])
    outputs = run(core)["a"]
    assert tokens_of(outputs) == ref.answers[1][: ref.answers[1].index(eos) + 1]
    assert outputs[-1].finish_reason == FinishReason.STOP


class _Mutant(TorchPaged):
    """Attention with one feature changed."""

    changes: dict[str, Any]

    def attend(
        self, spec: AttentionSpec, query: torch.Tensor, metadata: AttentionMetadata, exact: Exact | None = None
    ) -> torch.Tensor:
        changed = {name: change(getattr(spec, name), query) for name, change in self.changes.items()}
        return super().attend(replace(spec, **changed), query, metadata)


@pytest.mark.parametrize(
    ("kind", "feature", "change"),
    [
        ("mistral", "sliding_window", lambda value, query: None),
        ("mistral", "sliding_window", lambda value, query: value + 1),
        ("gemma2", "sliding_window", lambda value, query: None),
        ("gemma3_text", "sliding_window", lambda value, query: None),
        ("gemma2", "softcap", lambda value, query: None),
        ("gemma2", "scaling", lambda value, query: query.shape[-1] ** -0.5),
        ("gemma3_text", "scaling", lambda value, query: query.shape[-1] ** -0.5),
    ],
)
def test_attention_without_a_feature_is_found_out(
    reference: GetReference, monkeypatch: pytest.MonkeyPatch, kind: str, feature: str, change: Callable[..., Any]
) -> None:
    mutant = type("Mutant", (_Mutant,), {"changes": {feature: change}})
    monkeypatch.setattr(runner, "select_backend", lambda *_: mutant())
    ref = reference(kind)
    assert answers(ref.make_core(), ref.prompts) != ref.answers


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_positions_are_found_out(reference: GetReference, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    def build_wrongly(*arguments: Any) -> Batch:
        batch = build_batch(*arguments)
        # All positions shifted alike would change nothing under RoPE; those of decodes alone do.
        batch.position_ids[0, : batch.metadata.num_decodes] += 1
        return batch

    monkeypatch.setattr(runner, "build_batch", build_wrongly)
    ref = reference(kind)
    assert answers(ref.make_core(), ref.prompts) != ref.answers


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_query_heads_on_the_wrong_kv_heads_are_found_out(
    reference: GetReference, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    write = TorchPaged.write_kv
    monkeypatch.setattr(
        TorchPaged,
        "write_kv",
        lambda self, layer, key, value, metadata: write(self, layer, key.flip(1), value.flip(1), metadata),
    )
    ref = reference(kind)
    assert answers(ref.make_core(), ref.prompts) != ref.answers


def test_a_block_table_that_is_out_of_date_is_found_out(
    reference: GetReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Rows, "_append_blocks", lambda *_: None)
    ref = reference("llama")
    assert answers(ref.make_core(), ref.prompts) != ref.answers


def test_a_sampled_token_that_is_not_written_back_is_found_out(
    reference: GetReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Rows, "append", lambda *_: None)
    ref = reference("llama")
    assert answers(ref.make_core(), ref.prompts) != ref.answers
