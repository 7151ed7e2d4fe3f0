"""Tests results that arrive a step late: what is planned before them, and which of them are no longer wanted."""

from tests.engine.builders import EOS, make_request, make_scheduler, names_of, result_of, run_all, work_of
from tests.engine.executors import AtOnce
from tests.engine.pretended_constraints import PretendedMasks, TardySumModThree
from tests.engine.pretended_model import PretendedModel

from conveyor_engine.loop.overlap import Overlap
from conveyor_engine.scheduling.scheduler import Scheduler
from conveyor_engine.wire.request import FinishReason
from conveyor_engine.wire.step import StepPlan


def planned(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule(0.0)
    assert plan is not None
    return plan


def outputs_of(scheduler: Scheduler) -> dict[str, list[int]]:
    return {output.request_id: output.new_token_ids for output in scheduler.take_outputs()}


def test_a_decode_is_planned_before_anybody_knows_its_token() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 3))
    plans = [planned(scheduler) for _ in range(3)]
    assert [plan.num_computed_tokens for plan in plans] == [[0], [3], [4]]
    assert [plan.num_logits for plan in plans] == [[1], [1], [1]]
    assert [len(plan.admitted) for plan in plans] == [1, 0, 0], "the executor has the tokens itself"
    for plan, token_id in zip(plans, (7, 8, 9), strict=True):
        scheduler.update(result_of(plan, token_id))
        assert outputs_of(scheduler) == {"a": [token_id]}


def test_nothing_is_planned_behind_a_requests_last_token() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", max_tokens=2))
    plans = [planned(scheduler), planned(scheduler)]
    assert scheduler.schedule(0.0) is None
    assert scheduler.next_wakeup(5.0) == 5.0, "there are results to take"
    for plan in plans:
        scheduler.update(result_of(plan))
    assert scheduler.take_outputs()[-1].finish_reason is FinishReason.LENGTH


def test_a_token_behind_a_stop_is_discarded_and_its_place_is_free_at_once() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", max_tokens=9))
    first, second = planned(scheduler), planned(scheduler)
    scheduler.update(result_of(first, EOS))
    (output,) = scheduler.take_outputs()
    assert (output.finish_reason, output.new_token_ids) == (FinishReason.STOP, [EOS])
    assert scheduler.blocks.num_free == scheduler.blocks.num_blocks
    assert scheduler.has_unfinished(), "a step is not over"
    scheduler.update(result_of(second))
    assert outputs_of(scheduler) == {}
    assert not scheduler.has_unfinished()


def test_a_row_that_changes_hands_gives_its_new_owner_no_old_token() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add_request(make_request("a", max_tokens=9))
    scheduler.add_request(make_request("b", max_tokens=9))
    late = planned(scheduler)
    scheduler.abort("a")
    plan = planned(scheduler)
    assert late.rows == plan.rows == [0]
    assert work_of(scheduler, plan) == {"b": 4}
    scheduler.update(result_of(late, 8))
    assert outputs_of(scheduler) == {"a": []}
    scheduler.update(result_of(plan, 9))
    assert outputs_of(scheduler) == {"b": [9]}


def test_a_preempted_request_gets_no_token_of_an_earlier_step() -> None:
    scheduler = make_scheduler(num_kv_blocks=6, max_model_len=24, max_num_seqs=2, prefix_caching=False)
    scheduler.add_request(make_request("old", 8, max_tokens=16))
    scheduler.add_request(make_request("new", [300 + i for i in range(8)], max_tokens=16))
    plan, tokens = planned(scheduler), 0
    while not scheduler.stats().num_preemptions:
        ahead = planned(scheduler)
        scheduler.update(result_of(plan))
        tokens += len(outputs_of(scheduler).get("new", ()))
        plan = ahead
    scheduler.update(result_of(plan))
    assert tokens == scheduler.requests["new"].num_output_tokens
    ends = {name: output for step in run_all(scheduler) for name, output in step.items() if output.finish_reason}
    assert list(ends) == ["old", "new"]


def test_a_batch_that_keeps_together_is_not_planned_ahead() -> None:
    scheduler = make_scheduler("static", batching_window_seconds=0.0)
    scheduler.add_request(make_request("a"))
    plan = planned(scheduler)
    assert scheduler.schedule(0.0) is None
    scheduler.update(result_of(plan))
    assert scheduler.schedule(0.0) is not None


def test_who_shares_a_prefix_of_a_step_that_is_withdrawn_starts_anew() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 4))
    first = planned(scheduler)
    for name in ("b", "c"):
        scheduler.add_request(make_request(name, [*range(500, 512), ord(name)]))
    second = planned(scheduler)
    assert scheduler.stats().prefix_cache_hit_tokens == 8
    scheduler.withdraw(second)
    assert names_of(scheduler.running) == ["a", "b"]
    assert names_of(scheduler.waiting) == ["c"]
    scheduler.update(result_of(first))
    again = planned(scheduler)
    assert {row.row for row in again.admitted} >= {scheduler.requests["b"].row}, "nobody knows how much came of it"
    assert scheduler.requests["b"].num_computed_tokens == 0


def test_who_shares_a_prefix_with_one_that_left_before_it_was_written_starts_anew_if_the_step_fails() -> None:
    scheduler = make_scheduler()
    for name in ("a", "b", "c"):
        scheduler.add_request(make_request(name, [*range(500, 512), ord(name)]))
    scheduler.add_request(make_request("d", 4))
    plan = planned(scheduler)
    assert scheduler.stats().prefix_cache_hit_tokens == 24
    scheduler.abort("a")
    works = [work_of(scheduler, half) for half in scheduler.halve(plan)]
    assert works == [], "nobody else computes what they count on"
    assert names_of(scheduler.waiting) == ["b", "c", "d"]
    assert work_of(scheduler, planned(scheduler)) == {"b": 13, "c": 1, "d": 4}


def test_a_prefix_whose_last_token_was_left_out_of_a_repeated_step_is_not_shared() -> None:
    """Its mask was late, so it sat out the step that failed, and the halves of this step did not write its key."""
    masks = PretendedMasks()
    late = TardySumModThree(masks, [1000], 1000)
    scheduler = make_scheduler(constrain=lambda each: late if each.request_id == "a" else None, masks=masks)
    model = PretendedModel(block_size=4)
    overlap = Overlap(model, AtOnce(), 1)
    scheduler.add_request(make_request("a", 8))
    model.memory_tokens = 7
    overlap.step(scheduler, scheduler.schedule(0.0))
    overlap.step(scheduler, None)
    assert scheduler.running[0].num_computed_tokens == 7, "the step has failed, and was run again"
    model.memory_tokens = 100
    scheduler.add_request(make_request("b", 9))
    while "b" in scheduler.requests:
        overlap.step(scheduler, scheduler.schedule(0.0))
    assert not model.wrong
