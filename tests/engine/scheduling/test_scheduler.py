"""What a step contains, who is let in, who must go, and what everybody is told."""

from array import array
from pathlib import Path
from typing import Any

import pytest
from tests.engine.builders import EOS, make_request, make_scheduler, make_state, result_of, run_all, run_step, work_of

from conveyor_engine.errors import InvalidRequest, Overloaded
from conveyor_engine.scheduling.request_state import RequestState
from conveyor_engine.text.tokenizer import Tokenizer
from conveyor_engine.wire.request import EngineRequest, FinishReason


def test_a_step_mixes_decodes_and_chunks_of_prompts_within_the_budget() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10)
    scheduler.add_request(make_request("a", 6))
    run_step(scheduler)
    scheduler.add_request(make_request("b", [500 + i for i in range(20)]))
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert work_of(scheduler, plan) == {"a": 1, "b": 2}
    assert plan.num_decodes == 1


def test_a_long_prompt_beside_decodes_takes_a_share_of_each_step_and_short_ones_do_not_wait_for_its_end() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=1024, max_num_seqs=32, max_model_len=4096, num_kv_blocks=2048)
    for number in range(8):
        scheduler.add_request(make_request(f"decode {number}", [number], max_tokens=100))
    run_step(scheduler)
    scheduler.add_request(make_request("long", [5] * 2048))
    run_step(scheduler)
    for number in range(4):
        scheduler.add_request(make_request(f"short {number}", [number + 100] * 16))
    scheduler.add_request(make_request("long too", [6] * 2048))
    work = work_of(scheduler, scheduler.schedule(0.0))
    assert list(work.items())[8:] == [("long", 256), *((f"short {n}", 16) for n in range(4))]
    assert sum(work.values()) == 8 + 256 + 4 * 16


def test_long_prompts_have_the_whole_step_but_what_short_ones_need_while_nobody_decodes() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=1024, max_model_len=4096, num_kv_blocks=2048)
    for token_id, (name, length) in enumerate((("long", 2048), ("long too", 2048), ("short", 100))):
        scheduler.add_request(make_request(name, [token_id] * length))
    assert work_of(scheduler, scheduler.schedule(0.0)) == {"long": 924, "short": 100}


def test_a_chunk_that_does_not_end_the_prompt_samples_nothing() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10)
    scheduler.add_request(make_request("a", 15))
    assert run_step(scheduler) == {}
    assert run_step(scheduler)["a"].new_token_ids == [7]


def test_continuous_lets_a_request_in_as_soon_as_another_leaves() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for name, max_tokens in (("a", 1), ("b", 3), ("c", 1)):
        scheduler.add_request(make_request(name, max_tokens=max_tokens))
    assert set(run_step(scheduler)) == {"a", "b"}
    assert set(run_step(scheduler)) == {"b", "c"}


@pytest.mark.parametrize("mode", ["none", "static", "dynamic"])
def test_other_modes_let_nobody_in_before_the_batch_is_over(mode: str) -> None:
    scheduler = make_scheduler(mode, max_num_seqs=1 if mode == "none" else 2)
    scheduler.add_request(make_request("a", max_tokens=3))
    run_step(scheduler, now=100.0)
    scheduler.add_request(make_request("b"))
    for _ in range(2):
        run_step(scheduler, now=100.0)
        assert "b" in scheduler.waiting
    assert set(run_step(scheduler, now=100.0)) == {"b"} or mode == "static"


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


def test_real_padding_steps_dummies_to_the_longest_prompt_and_to_the_slowest_row() -> None:
    scheduler = make_scheduler("static", padding="real")
    scheduler.add_request(make_request("a", 4, max_tokens=2))
    scheduler.add_request(make_request("b", 10, max_tokens=5))
    num_tokens = 0
    while scheduler.has_unfinished():
        run_step(scheduler, now=100.0)
        num_tokens += scheduler.stats().step_num_tokens
    assert scheduler.stats().padding_tokens == (10 - 4) + (5 - 2)
    assert num_tokens == 2 * (10 + 5 - 1), "as much as a padded (2, 14) tensor"


def test_padding_longer_than_the_budget_is_stepped_in_chunks() -> None:
    scheduler = make_scheduler("static", padding="real", max_num_batched_tokens=8)
    scheduler.add_request(make_request("a", 4, max_tokens=1))
    scheduler.add_request(make_request("b", 30, max_tokens=1))
    num_tokens = 0
    while scheduler.has_unfinished():
        plan = scheduler.schedule(100.0)
        assert plan is not None
        assert 0 < sum(plan.num_tokens) <= 8
        num_tokens += sum(plan.num_tokens)
        scheduler.update(result_of(plan))
        scheduler.take_outputs()
    assert num_tokens == 2 * 30, "a prompt's last token gives the only one of the answer"
    assert scheduler.stats().padding_tokens == 26


def test_the_newest_request_is_preempted_and_comes_back_first() -> None:
    scheduler = make_scheduler(num_kv_blocks=6, max_model_len=24, max_num_seqs=2, prefix_caching=False)
    scheduler.add_request(make_request("old", 8, max_tokens=16))
    scheduler.add_request(make_request("new", [300 + i for i in range(8)], max_tokens=16))
    scheduler.add_request(make_request("waiting", [400], max_tokens=16))
    while not scheduler.stats().num_preemptions:
        run_step(scheduler)
    assert [r.request_id for r in scheduler.running] == ["old"]
    assert next(iter(scheduler.waiting)) == "new"
    finished = [name for step in run_all(scheduler) for name, output in step.items() if output.finish_reason]
    assert finished == ["old", "new", "waiting"]


def test_a_preempted_request_repeats_nothing_it_has_already_said() -> None:
    scheduler = make_scheduler(num_kv_blocks=6, max_model_len=24)
    for name, first in (("old", 100), ("new", 300)):
        scheduler.add_request(make_request(name, [first + i for i in range(8)], max_tokens=16))
    told: dict[str, list[int]] = {"old": [], "new": []}
    for step in run_all(scheduler):
        for name, output in step.items():
            told[name] += output.new_token_ids
    assert scheduler.stats().num_preemptions > 0
    assert {name: len(tokens) for name, tokens in told.items()} == {"old": 16, "new": 16}


def test_admission_needs_room_for_the_whole_prompt_and_a_watermark() -> None:
    scheduler = make_scheduler(num_kv_blocks=400, max_num_batched_tokens=2000, max_model_len=1600)
    scheduler.add_request(make_request("a", [5] * (396 * 4 - 1), max_tokens=9))  # leaves 4 blocks, the watermark
    scheduler.add_request(make_request("b", [5], max_tokens=1))
    run_step(scheduler)
    assert "b" in scheduler.waiting


CLOSED = [("none", None), ("static", "real"), ("static", "none"), ("dynamic", None)]


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


def test_the_expected_length_of_an_answer_follows_those_that_were_given() -> None:
    scheduler = make_scheduler("dynamic", num_kv_blocks=1024, max_model_len=1024, batching_window_seconds=0.0)
    for number in range(200):
        scheduler.add_request(make_request(str(number), 4, max_tokens=8))
        run_all(scheduler, now=100.0)
    scheduler.add_request(make_request("chat", 4, max_tokens=1000))
    assert scheduler.requests["chat"].expected_total_tokens == 4 + 8


@pytest.mark.parametrize(("mode", "padding"), CLOSED[1:])
def test_who_is_preempted_from_a_closed_batch_comes_back_before_anybody_else(mode: str, padding: str | None) -> None:
    scheduler = make_scheduler(mode, padding=padding, num_kv_blocks=6, max_model_len=24, max_num_seqs=2)
    scheduler._answers.expected_output_tokens = 1.0
    scheduler.add_request(make_request("old", 8, max_tokens=15))
    scheduler.add_request(make_request("new", [300 + i for i in range(8)], max_tokens=16))
    scheduler.add_request(make_request("later", [400 + i for i in range(8)], max_tokens=16))
    ends: list[set[str]] = []
    told = dict.fromkeys(("old", "new", "later"), 0)
    while scheduler.has_unfinished():
        if "later" in {r.request_id for r in scheduler.running}:
            assert {"old", "new"}.isdisjoint(scheduler.requests), "nobody joins a batch that is not over"
        outputs = run_step(scheduler, now=100.0)
        ends.append({name for name, output in outputs.items() if output.finish_reason})
        for name, output in outputs.items():
            told[name] += len(output.new_token_ids)
    assert scheduler.stats().num_preemptions > 0
    assert told == {"old": 15, "new": 16, "later": 16}
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


def test_a_padded_batch_pays_for_its_padding_in_attention_and_cache_too() -> None:
    """Each row holds and attends what a row of a padded tensor does while the prompts are computed: a right triangle
    of queries and keys as long as the longest. A finished row goes on, one token longer each step.
    """
    scheduler = make_scheduler("static", padding="real", num_kv_blocks=64, max_num_batched_tokens=64)
    scheduler.add_request(make_request("a", 4, max_tokens=2))
    scheduler.add_request(make_request("b", 12, max_tokens=9))
    attended = dict.fromkeys("ab", 0)
    while scheduler.running or scheduler.waiting:
        plan = scheduler.schedule(100.0)
        assert plan is not None
        for name, computed in zip(work := work_of(scheduler, plan), plan.num_computed_tokens, strict=True):
            attended[name] += sum(range(computed + 1, computed + 1 + work[name]))
        scheduler.update(result_of(plan))
        rows = {r.request_id: len(r.block_table) for r in scheduler.running}
        assert not rows or rows["a"] >= 3, "as many blocks as the longest prompt"
    assert attended == {"a": sum(range(1, 13)) + sum(range(5, 13)), "b": sum(range(1, 13)) + sum(range(13, 21))}


def test_a_finished_row_of_a_padded_batch_never_grows_beyond_the_context() -> None:
    scheduler = make_scheduler("static", padding="real", max_model_len=16, max_num_seqs=2)
    scheduler.add_request(make_request("a", 14, max_tokens=1))
    scheduler.add_request(make_request("b", 2, max_tokens=14))
    while scheduler.has_unfinished():
        plan = scheduler.schedule(100.0)
        assert plan is not None
        assert all(computed + n <= 16 for computed, n in zip(plan.num_computed_tokens, plan.num_tokens, strict=True))
        scheduler.update(result_of(plan))
        assert all(len(r.block_table) * 4 <= 16 for r in scheduler.running)
        scheduler.take_outputs()
    assert scheduler.stats().step_num_seqs == 2


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


def test_requests_that_arrive_together_share_their_prefix_in_one_step() -> None:
    scheduler = make_scheduler()
    prompt = list(range(100, 112))
    scheduler.add_request(make_request("a", [*prompt, 1]))
    scheduler.add_request(make_request("b", [*prompt, 3]))
    scheduler.schedule(0.0)
    first, second = scheduler.running
    assert first.block_table[:3] == second.block_table[:3]
    assert scheduler.stats().prefix_cache_hit_tokens == 12


def test_a_prompt_of_nothing_but_cached_blocks_still_computes_its_last_token() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 8, max_tokens=1))
    run_step(scheduler)
    scheduler.add_request(make_request("b", 8, max_tokens=1))
    output = run_step(scheduler)["b"]
    assert output.num_cached_tokens == 4
    assert output.new_token_ids == [7]


def test_blocks_computed_before_an_abort_are_found_again() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 12))
    run_step(scheduler)
    scheduler.abort("a")
    scheduler.add_request(make_request("b", 13))
    run_step(scheduler)
    assert scheduler.stats().prefix_cache_hit_tokens == 12


def test_choices_hash_the_blocks_of_their_prompt_once() -> None:
    scheduler, hashes = make_scheduler(), list[bytes]()
    for name in ("a", "b"):
        scheduler.add_request(make_request(name, 9, max_tokens=8, prompt_hashes=hashes))
    first, second = scheduler.requests.values()
    while scheduler.has_unfinished():
        run_step(scheduler)
    assert len(hashes) == 2, "of the prompt's full blocks only"
    assert first.block_hashes[:2] == second.block_hashes[:2] == hashes
    assert all(one is other for one, other in zip(first.block_hashes[:2], second.block_hashes[:2], strict=True))
    assert len(first.block_hashes) > 2


def test_prefix_caching_can_be_switched_off() -> None:
    scheduler = make_scheduler(prefix_caching=False)
    for name in ("a", "b"):
        scheduler.add_request(make_request(name, 12))
    run_all(scheduler)
    assert (scheduler.stats().prefix_cache_query_tokens, scheduler.stats().prefix_cache_hit_tokens) == (0, 0)


def test_an_abort_frees_the_blocks_at_once_and_is_told_once() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 12))
    run_step(scheduler)
    scheduler.abort("a")
    scheduler.abort("a")
    assert scheduler.blocks.num_free == scheduler.blocks.num_blocks
    assert scheduler.has_unfinished()
    assert run_step(scheduler)["a"].finish_reason == FinishReason.ABORT
    assert not scheduler.has_unfinished()


def test_a_full_queue_refuses() -> None:
    scheduler = make_scheduler(max_num_queued_requests=1, max_num_seqs=2)
    for request_id in "abc":  # two places, one may wait
        scheduler.add_request(make_request(request_id))
    with pytest.raises(Overloaded, match="waiting"):
        scheduler.add_request(make_request("d"))
    run_step(scheduler)
    with pytest.raises(Overloaded, match="waiting"):
        scheduler.add_request(make_request("d"))
    run_all(scheduler)
    scheduler.add_request(make_request("d"))


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (make_request("a", []), "a token of prompt"),
        (make_request("a", max_tokens=0), "one of output"),
        (make_request("a", 60, max_tokens=5), "60 tokens of prompt and 5 of output are more than the context of 64"),
    ],
)
def test_what_could_never_run_is_refused(request_: EngineRequest, message: str) -> None:
    scheduler = make_scheduler()
    with pytest.raises(InvalidRequest, match=message):
        scheduler.add_request(request_)
    assert not scheduler.has_unfinished()


def test_a_request_id_in_use_is_refused() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a"))
    with pytest.raises(InvalidRequest, match="in use"):
        scheduler.add_request(make_request("a"))


def test_an_end_of_sequence_token_stops_and_is_part_of_the_answer() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a"))
    output = run_step(scheduler, token_id=EOS)["a"]
    assert (output.finish_reason, output.new_token_ids) == (FinishReason.STOP, [EOS])


def test_ignore_eos_goes_on_and_stop_token_ids_still_stop() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", ignore_eos=True, stop_token_ids=(9,)))
    assert run_step(scheduler, token_id=EOS)["a"].finish_reason is None
    assert run_step(scheduler, token_id=9)["a"].finish_reason == FinishReason.STOP


def test_logits_that_are_not_finite_end_the_request_with_an_error() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a"))
    output = run_step(scheduler, token_id=-1)["a"]
    assert output.finish_reason == FinishReason.ERROR
    assert "not finite" in (output.message or "")


def test_nobody_shares_the_blocks_of_a_request_whose_logits_were_not_finite() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 12))
    run_step(scheduler, token_id=-1)
    scheduler.add_request(make_request("b", 13))
    run_step(scheduler)
    scheduler.blocks.check([r.block_table for r in scheduler.running])
    assert scheduler.stats().prefix_cache_hit_tokens == 0


def test_the_next_wakeup_is_the_end_of_the_window_or_now_when_draining() -> None:
    scheduler = make_scheduler("dynamic", batching_window_seconds=10.0)
    assert scheduler.next_wakeup(0.0) is None
    scheduler.add_request(make_request("a", arrival_time=1.0))
    scheduler.add_request(make_request("b", arrival_time=2.0))
    assert scheduler.next_wakeup(2.0) == 11.0
    assert run_step(scheduler, now=3.0) == {}
    scheduler.drain()
    assert scheduler.next_wakeup(3.0) == 3.0
    assert set(run_step(scheduler, now=3.0)) == {"a", "b"}


def test_counters_agree_with_what_was_asked_and_answered() -> None:
    scheduler = make_scheduler(num_kv_blocks=8, max_model_len=24)
    for number in range(5):
        scheduler.add_request(make_request(str(number), [number * 50 + i for i in range(8)], max_tokens=16))
    scheduler.add_request(make_request("gone"))
    scheduler.abort("gone")
    run_all(scheduler)
    stats = scheduler.stats()
    assert (stats.prompt_tokens, stats.generation_tokens) == (5 * 8, 5 * 16)
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)
    assert stats.num_preemptions > 0


def test_paged_blocks_waste_less_than_four_percent_at_contexts_of_hundreds_of_tokens() -> None:
    """The bar of PagedAttention (Kwon et al., SOSP'23), where a reserved cache wastes 60 to 80 percent."""

    def waste(mode: str) -> float:
        scheduler = make_scheduler(
            mode, block_size=16, num_kv_blocks=512, max_model_len=1024, max_num_seqs=8, max_num_batched_tokens=1024
        )
        for number in range(24):
            scheduler.add_request(
                make_request(str(number), [number] * (200 + 7 * number), max_tokens=40 + 31 * number % 200)
            )
        run_all(scheduler, now=100.0)
        stats = scheduler.stats()
        return 1 - stats.kv_live_token_steps / stats.kv_allocated_token_steps

    assert 0 < waste("continuous") < 0.04 < waste("dynamic") < waste("static")


@pytest.mark.parametrize(
    ("first", "second", "num_shared"), [(None, None, 8), ("a", "a", 8), ("a", None, 0), (None, "a", 0), ("a", "b", 0)]
)
def test_prefixes_are_shared_within_one_cache_salt(first: str | None, second: str | None, num_shared: int) -> None:
    scheduler = make_scheduler()
    cached = []
    for request_id, salt in (("one", first), ("two", second)):
        scheduler.add_request(make_request(request_id, 9, cache_salt=salt, max_tokens=1))
        cached.append(run_step(scheduler)[request_id].num_cached_tokens)
    assert cached == [0, num_shared]


def test_no_salt_has_the_hash_of_a_block_as_its_root() -> None:
    """Else whoever knows a block could ask for what came after it, and answer others with what did not."""
    block = make_state(list(range(4))).hashes_of_full_blocks(4, 4)[0]
    salt = array("I", range(4)).tobytes().decode()
    assert RequestState(make_request("a", 4, cache_salt=salt), ()).cache_root != block
