"""Tests what a step contains, and which requests are preempted for it."""

from tests.engine.builders import make_request, make_scheduler, names_of, run_all, run_step, work_of

from conveyor_engine.wire.pictures import PictureSpan
from conveyor_engine.wire.request import EngineRequest


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


def make_image_request(number: int) -> EngineRequest:
    """Make a request of 100 tokens, most of which stand for an image."""
    span = PictureSpan(2, 98, bytes([number]))
    return make_request(f"image {number}", [number + 50] * 100, pictures=[span])


def test_prompts_with_images_share_the_part_of_long_ones_beside_decodes_because_a_step_encodes_their_images() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=1024, max_num_seqs=32, max_model_len=4096, num_kv_blocks=2048)
    scheduler.add_request(make_request("decode", [7], max_tokens=100))
    run_step(scheduler)
    for number in range(6):
        scheduler.add_request(make_image_request(number))
    scheduler.add_request(make_request("text", [6] * 100))
    work = work_of(scheduler, scheduler.schedule(0.0))
    assert work == {"decode": 1, "image 0": 100, "image 1": 100, "image 2": 56, "text": 100}


def test_prompts_with_images_have_the_whole_step_while_nobody_decodes() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=1024, max_num_seqs=32, max_model_len=4096, num_kv_blocks=2048)
    for number in range(6):
        scheduler.add_request(make_image_request(number))
    assert sum(work_of(scheduler, scheduler.schedule(0.0)).values()) == 600


def test_a_chunk_that_does_not_end_the_prompt_samples_nothing() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10)
    scheduler.add_request(make_request("a", 15))
    assert run_step(scheduler) == {}
    assert run_step(scheduler)["a"].new_token_ids == [7]


def test_the_newest_request_is_preempted_and_comes_back_first() -> None:
    scheduler = make_scheduler(num_kv_blocks=6, max_model_len=24, max_num_seqs=2, prefix_caching=False)
    scheduler.add_request(make_request("old", 8, max_tokens=16))
    scheduler.add_request(make_request("new", [300 + i for i in range(8)], max_tokens=16))
    scheduler.add_request(make_request("waiting", [400], max_tokens=16))
    while not scheduler.stats().num_preemptions:
        run_step(scheduler)
    assert [r.request_id for r in scheduler.running] == ["old"]
    assert names_of(scheduler.waiting) == ["new", "waiting"]
    finished = [name for step in run_all(scheduler) for name, output in step.items() if output.finish_reason]
    assert finished == ["old", "new", "waiting"]


def test_the_worst_level_is_preempted_first_however_old_and_comes_back_behind_the_better_ones() -> None:
    scheduler = make_scheduler(num_kv_blocks=9, max_model_len=24, max_num_seqs=3, prefix_caching=False)
    for name, level, first in (("worst", 9, 100), ("old", 2, 300), ("new", 2, 500)):
        scheduler.add_request(make_request(name, [first + i for i in range(8)], max_tokens=16, level=level))
    assert list(work_of(scheduler, scheduler.schedule(0.0))) == ["old", "new", "worst"]
    scheduler = make_scheduler(num_kv_blocks=9, max_model_len=24, max_num_seqs=3, prefix_caching=False)
    for name, level, first in (("worst", 9, 100), ("old", 2, 300), ("new", 2, 500)):
        scheduler.add_request(make_request(name, [first + i for i in range(8)], max_tokens=16, level=level))
        run_step(scheduler)
    assert names_of(scheduler.running) == ["worst", "old", "new"]
    while not scheduler.stats().num_preemptions:
        run_step(scheduler)
    assert names_of(scheduler.running) == ["old", "new"]
    scheduler.add_request(make_request("better", [700], level=1))
    assert names_of(scheduler.waiting) == ["better", "worst"]
    finished = [name for step in run_all(scheduler) for name, output in step.items() if output.finish_reason]
    assert finished == ["better", "old", "new", "worst"]
    assert scheduler.blocks.num_free == scheduler.blocks.num_blocks


def test_a_better_level_takes_no_row_from_a_request_that_runs() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add_request(make_request("worse", level=1))
    run_step(scheduler)
    scheduler.add_request(make_request("better", level=0))
    finished = [name for step in run_all(scheduler) for name, output in step.items() if output.finish_reason]
    assert finished == ["worse", "better"]
    assert not scheduler.stats().num_preemptions


def test_a_preempted_request_repeats_nothing_it_has_already_said() -> None:
    scheduler = make_scheduler(num_kv_blocks=6, max_model_len=24)
    for name, first in (("old", 100), ("new", 300)):
        scheduler.add_request(make_request(name, [first + i for i in range(8)], max_tokens=16))
    outputs: dict[str, list[int]] = {"old": [], "new": []}
    for step in run_all(scheduler):
        for name, output in step.items():
            outputs[name] += output.new_token_ids
    assert scheduler.stats().num_preemptions > 0
    assert {name: len(tokens) for name, tokens in outputs.items()} == {"old": 16, "new": 16}
