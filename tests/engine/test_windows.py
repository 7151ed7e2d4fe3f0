"""Greedy tokens equal those of transformers while layers with a window free the blocks before it.

The windows are shorter than a block, and other requests use freed blocks at once. So a read of a freed block would
change a token.
"""

from collections.abc import Callable
from typing import Any

import pytest
from tests.engine.references import Reference, answers

from conveyor_engine.loop.core import EngineCore
from conveyor_engine.wire import kv_tables
from conveyor_engine.wire.kv_tables import KVTables

GetReference = Callable[[str], Reference]
# (kind, backend, full tables, windowed tables): two layers with a window and one without; heads of one size; heads of
# two sizes; sinks; layers in one call; a window in every layer.
MODELS = [
    ("gemma3_text", "torch", 1, 2),
    ("gemma4_text", "auto", 1, 1),
    ("gpt_oss", "auto", 1, 2),
    ("ministral", "auto", 1, 2),
    ("mistral", "torch", 0, 1),
]
KINDS = [kind for kind, *_ in MODELS]


@pytest.fixture(autouse=True)
def _short_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_tables, "TILE_TOKENS", 16)


def make_core(reference: Reference, kind: str, **changes: Any) -> EngineCore:
    backend = next(backend for name, backend, *_ in MODELS if name == kind)
    return reference.make_core(attention_backend=backend, **changes)


def tables_of(core: EngineCore) -> KVTables:
    return core.scheduler._facts.kv_tables


@pytest.mark.parametrize(("kind", "full", "windowed"), [(kind, full, windowed) for kind, _, full, windowed in MODELS])
def test_prompts_in_chunks_give_the_tokens_of_generate_and_free_blocks(
    reference: GetReference, kind: str, full: int, windowed: int
) -> None:
    ref = reference(kind)
    core = make_core(ref, kind)
    assert (tables_of(core).full, tables_of(core).windowed) == (full, windowed)
    kept = _watch_windows(core)
    assert answers(core, ref.prompts) == ref.answers
    assert max(kept) > 0
    assert core.scheduler.blocks.num_free == core.scheduler.blocks.num_blocks


def _watch_windows(core: EngineCore) -> list[int]:
    """Return a list to which each step adds the index of every request's first kept block."""
    kept: list[int] = []
    core.scheduler.on_step = lambda *_: kept.extend(request.window.first for request in core.scheduler.running)
    return kept


@pytest.mark.parametrize("kind", ["gemma4_text", "gpt_oss", "ministral"])
def test_a_step_within_the_first_block_of_which_nothing_is_sampled_gives_them_too(
    reference: GetReference, kind: str
) -> None:
    ref = reference(kind)
    core = make_core(ref, kind, max_num_seqs=1, max_num_batched_tokens=4)
    assert answers(core, ref.prompts[:2]) == ref.answers[:2]


@pytest.mark.parametrize("kind", KINDS)
def test_preempted_requests_give_them_too(reference: GetReference, kind: str) -> None:
    ref = reference(kind)
    core = make_core(ref, kind, num_kv_blocks=6, max_num_seqs=6)
    assert answers(core, ref.prompts) == ref.answers
    assert core.stats().num_preemptions > 0


@pytest.mark.parametrize("kind", KINDS)
def test_requests_that_share_a_prefix_give_them_too(reference: GetReference, kind: str) -> None:
    ref = reference(kind)
    core = make_core(ref, kind, max_num_batched_tokens=512)
    for _ in range(2):
        assert answers(core, ref.prompts[4:]) == ref.answers[4:]
    assert core.stats().prefix_cache_hit_tokens >= 32 + 32 + 32, "within one step, and twice again"


@pytest.mark.parametrize(
    ("mode", "padding"), [("none", None), ("static", "real"), ("static", "none"), ("dynamic", None)]
)
@pytest.mark.parametrize("kind", ["gemma3_text", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_every_other_mode_gives_them_too(reference: GetReference, kind: str, mode: str, padding: str | None) -> None:
    ref = reference(kind)
    assert answers(make_core(ref, kind, batching_mode=mode, padding=padding), ref.prompts) == ref.answers


@pytest.mark.parametrize("kind", ["gemma4_text", "gpt_oss"])
def test_steps_planned_ahead_and_replayed_from_graphs_give_them_too(reference: GetReference, kind: str) -> None:
    ref = reference(kind)
    core = make_core(ref, kind, overlap=True, capture=_run_again)
    assert answers(core, ref.prompts) == ref.answers


def _run_again(work: Callable[[], None]) -> Callable[[], None]:
    work()
    return work
