"""Tests the real cost of padding in `static`: steps, attention and cache are those of a padded tensor."""

from tests.engine.builders import make_request, make_scheduler, result_of, run_step, work_of


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
