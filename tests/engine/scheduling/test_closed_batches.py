"""Tests batches that no request joins. They are admitted whole, and in `static` padded and answered together."""

from pathlib import Path
from typing import Any

import pytest
from tests.engine.builders import make_request, make_scheduler, names_of, result_of, run_all, run_step, work_of

from conveyor_engine.text.tokenizer import Tokenizer
from conveyor_engine.wire.request import FinishReason

CLOSED = [("none", None), ("static", "real"), ("static", "none"), ("dynamic", None)]


@pytest.mark.parametrize("mode", ["none", "static", "dynamic"])
def test_other_modes_let_nobody_in_before_the_batch_is_over(mode: str) -> None:
    scheduler = make_scheduler(mode, max_num_seqs=1 if mode == "none" else 2)
    scheduler.add_request(make_request("a", max_tokens=3))
    run_step(scheduler, now=100.0)
    scheduler.add_request(make_request("b"))
    for _ in range(2):
        run_step(scheduler, now=100.0)
        assert names_of(scheduler.waiting) == ["b"]
    run_step(scheduler, now=100.0)
    assert [r.request_id for r in scheduler.running] == ["b"]


@pytest.mark.parametrize(("mode", "padding"), CLOSED)
def test_a_request_that_may_take_the_whole_context_reserves_what_answers_usually_take(
    mode: str, padding: str | None
) -> None:
    changes: dict[str, Any] = {"max_num_seqs": 1} if mode == "none" else {}
    scheduler = make_scheduler(mode, padding=padding, max_model_len=4096, num_kv_blocks=1024, **changes)
    for name in ("a", "b", "c", "d"):
        scheduler.add_request(make_request(name, 16, max_tokens=4080))
    run_step(scheduler, now=100.0)
    assert len(scheduler.running) == (1 if mode == "none" else 4)
    assert all(len(r.block_table) == (16 + 256) // 4 for r in scheduler.running)


@pytest.mark.parametrize(("mode", "padding"), CLOSED[1:])
def test_who_is_preempted_from_a_closed_batch_comes_back_before_anybody_else(mode: str, padding: str | None) -> None:
    scheduler = make_scheduler(mode, padding=padding, num_kv_blocks=6, max_model_len=24, max_num_seqs=2)
    for number in range(200):  # so that longer answers are not expected
        scheduler.add_request(make_request(str(number), 1, max_tokens=1))
        run_all(scheduler, now=100.0)
    scheduler.add_request(make_request("old", 8, max_tokens=15))
    scheduler.add_request(make_request("new", [300 + i for i in range(8)], max_tokens=16))
    scheduler.add_request(make_request("later", [400 + i for i in range(8)], max_tokens=16))
    ends: list[set[str]] = []
    num_outputs = dict.fromkeys(("old", "new", "later"), 0)
    while scheduler.has_unfinished():
        if "later" in {r.request_id for r in scheduler.running}:
            assert {"old", "new"}.isdisjoint(scheduler.requests), "nobody joins a batch that is not over"
        outputs = run_step(scheduler, now=100.0)
        ends.append({name for name, output in outputs.items() if output.finish_reason})
        for name, output in outputs.items():
            num_outputs[name] += len(output.new_token_ids)
    assert scheduler.stats().num_preemptions > 0
    assert num_outputs == {"old": 15, "new": 16, "later": 16}
    together = [{"old", "new"}, {"later"}]
    assert [end for end in ends if end] == (together if mode == "static" else [{"old"}, {"new"}, {"later"}])


def test_a_closed_batch_leaves_out_what_does_not_fit_into_the_cache() -> None:
    scheduler = make_scheduler("static", num_kv_blocks=6, max_model_len=24, prefix_caching=False)
    for name in ("a", "b", "c"):
        scheduler.add_request(make_request(name, 4, max_tokens=8))  # three blocks each
    run_step(scheduler, now=100.0)
    assert [r.request_id for r in scheduler.running] == ["a", "b"]
    run_all(scheduler, now=100.0)
    assert scheduler.stats().num_preemptions == 0
    assert scheduler.stats().batch_close_reasons == {"kv_blocks": 1, "window": 1}


def test_static_answers_all_together_when_the_slowest_is_done() -> None:
    scheduler = make_scheduler("static")
    scheduler.add_request(make_request("short", max_tokens=1))
    scheduler.add_request(make_request("long", max_tokens=5))
    *before, last = run_all(scheduler, now=100.0)
    assert all(step == {} for step in before)
    assert len(last["short"].new_token_ids) == 1
    assert len(last["long"].new_token_ids) == 5
    assert {output.finish_reason for output in last.values()} == {FinishReason.LENGTH}


def test_a_finished_static_row_keeps_its_blocks_and_counts_as_running() -> None:
    scheduler = make_scheduler("static")
    scheduler.add_request(make_request("short", max_tokens=1))
    scheduler.add_request(make_request("long", [300, 301, 302], max_tokens=5))
    run_step(scheduler, now=100.0)
    assert scheduler.stats().num_running == 2
    scheduler.blocks.check([r.block_table for r in scheduler.running])
    assert scheduler.running[0].finished
    assert scheduler.running[0].block_table


def test_static_gives_up_the_answers_of_the_finished_when_the_last_runner_is_aborted() -> None:
    scheduler = make_scheduler("static")
    scheduler.add_request(make_request("short", max_tokens=1))
    scheduler.add_request(make_request("long", max_tokens=50))
    run_step(scheduler, now=100.0)
    scheduler.abort("long")
    assert scheduler.next_wakeup(100.0) == 100.0
    outputs = run_step(scheduler, now=100.0)
    assert outputs["long"].finish_reason == FinishReason.ABORT
    assert (outputs["short"].finish_reason, outputs["short"].new_token_ids) == (FinishReason.LENGTH, [7])
    assert not scheduler.has_unfinished()


@pytest.mark.parametrize("padding", ["real", "none"])
def test_a_static_batch_computes_all_prompts_before_any_decode(padding: str) -> None:
    scheduler = make_scheduler("static", padding=padding, max_num_batched_tokens=8)
    for name, length in (("a", 4), ("b", 20), ("c", 9)):
        scheduler.add_request(make_request(name, [ord(name)] * length, max_tokens=5))
    kinds = []
    while scheduler.has_unfinished():
        plan = scheduler.schedule(100.0)
        names = list(work_of(scheduler, plan))
        assert plan is not None
        decodes = [name for name in names[: plan.num_decodes] if scheduler.requests[name].num_output_tokens]
        kinds.append("decodes" if decodes else "prompts")
        assert not decodes or plan.num_decodes == len(names)
        scheduler.update(result_of(plan))
        scheduler.take_outputs()
    assert kinds == sorted(kinds, reverse=True)


@pytest.mark.parametrize("padding", ["real", "none"])
def test_a_stop_string_ends_a_row_of_a_static_batch(chat_model: Path, padding: str) -> None:
    tokenizer = Tokenizer(chat_model)
    (token_id,) = tokenizer.encode("x", 1)
    scheduler = make_scheduler("static", padding=padding, tokenizer=tokenizer, vocab_size=tokenizer.vocab_size)
    scheduler.add_request(make_request("stops", max_tokens=50, stop=("xxx",)))
    scheduler.add_request(make_request("late", max_tokens=50, stop=("xxx",), min_tokens=10))
    steps = 0
    outputs: dict[str, Any] = {}
    while scheduler.has_unfinished():
        outputs = run_step(scheduler, now=100.0, token_id=token_id)
        steps += 1
    assert [(o.finish_reason, len(o.new_token_ids)) for o in outputs.values()] == [
        (FinishReason.STOP_STRING, 3),
        (FinishReason.STOP_STRING, 13),
    ]
    assert steps == 13
