"""Tests which requests are admitted and when, which are refused or aborted, and when there is work to do."""

import tracemalloc

import pytest
from tests.engine.builders import make_request, make_scheduler, names_of, run_all, run_step

from conveyor_engine.errors import InvalidRequest, Overloaded
from conveyor_engine.wire.frames import FrameReader, encode_frame
from conveyor_engine.wire.messages import Add, to_engine_decoder
from conveyor_engine.wire.request import EngineRequest, FinishReason


def test_continuous_lets_a_request_in_as_soon_as_another_leaves() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for name, max_tokens in (("a", 1), ("b", 3), ("c", 1)):
        scheduler.add_request(make_request(name, max_tokens=max_tokens))
    assert set(run_step(scheduler)) == {"a", "b"}
    assert set(run_step(scheduler)) == {"b", "c"}


def test_admission_needs_room_for_the_whole_prompt_and_a_watermark() -> None:
    scheduler = make_scheduler(num_kv_blocks=400, max_num_batched_tokens=2000, max_model_len=1600)
    scheduler.add_request(make_request("a", [5] * (396 * 4 - 1), max_tokens=9))  # leaves 4 blocks, the watermark
    scheduler.add_request(make_request("b", [5], max_tokens=1))
    run_step(scheduler)
    assert names_of(scheduler.waiting) == ["b"]


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
        (make_request("a", []), "at least one prompt token"),
        (make_request("a", max_tokens=0), "one output token"),
        (make_request("a", 60, max_tokens=5), "60 prompt tokens and 5 output tokens exceed the model's context of 64"),
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


def test_an_abort_frees_the_blocks_at_once_and_is_reported_once() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 12))
    run_step(scheduler)
    scheduler.abort("a")
    scheduler.abort("a")
    assert scheduler.blocks.num_free == scheduler.blocks.num_blocks
    assert scheduler.has_unfinished()
    assert run_step(scheduler)["a"].finish_reason == FinishReason.ABORT
    assert not scheduler.has_unfinished()


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


def test_a_prompt_that_waits_takes_four_bytes_a_token() -> None:
    tokens = 100_000
    scheduler = make_scheduler(max_model_len=2 * tokens, vocab_size=200_000)
    frames = [encode_frame(Add.of([make_request(name, list(range(50_000, 50_000 + tokens)))])) for name in "abcd"]
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for frame in frames:
            (payload,) = FrameReader().feed(frame)
            add = to_engine_decoder.decode(payload)
            assert isinstance(add, Add)
            for request in add.requests(0.0):
                scheduler.add_request(request)
        del payload, add, request
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len(scheduler.waiting) == 4
    assert held < 4.2 * 4 * tokens
