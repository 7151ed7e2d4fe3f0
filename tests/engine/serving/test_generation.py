import asyncio

import pytest

from conveyor_engine.errors import EngineDead
from conveyor_engine.serving.generation import Generation, ReadTurns
from conveyor_engine.wire.request import FinishReason, RequestOutput, TokenLogprobs


def token(request_id: str, reason: FinishReason | None = None) -> RequestOutput:
    return RequestOutput(request_id=request_id, new_token_ids=[1], finish_reason=reason)


async def test_outputs_that_come_together_are_read_together() -> None:
    aborted: list[str] = []
    async with Generation(["a", "b"], 60, aborted.extend, ReadTurns()) as generation:
        generation.put(token("a"))
        generation.put(token("b", FinishReason.STOP))
        generation.put(token("a", FinishReason.LENGTH))
        batches = [[(o.request_id, o.finish_reason) for o in batch] async for batch in generation.batches()]
    assert batches == [[("a", FinishReason.LENGTH), ("b", FinishReason.STOP)]]
    assert aborted == ["a", "b"]


async def test_a_reader_that_is_behind_gets_a_request_s_outputs_as_one() -> None:
    parts = [
        RequestOutput(
            request_id="a", new_token_ids=[i], logprobs=[TokenLogprobs.of(i, -0.5, [i], [-0.5])], num_cached_tokens=16
        )
        for i in range(3)
    ]
    last = RequestOutput(request_id="a", new_token_ids=[3, 4], finish_reason=FinishReason.STOP)
    held: list[int] = []
    async with Generation(["a"], 60, lambda _: None, ReadTurns()) as generation:
        generation.on_held = held.append
        for output in (*parts, last):
            generation.put(output)
        (output,) = [output async for batch in generation.batches() for output in batch]
    assert (output.new_token_ids, output.finish_reason) == ([0, 1, 2, 3, 4], FinishReason.STOP)
    assert [entry.token_id for entry in output.logprobs or ()] == [0, 1, 2]
    assert output.num_cached_tokens == 16
    assert sum(held) == 0


@pytest.mark.parametrize("reason", [FinishReason.DEADLINE, FinishReason.ERROR, FinishReason.ABORT])
async def test_a_failure_is_read_after_what_came_before_it(reason: FinishReason) -> None:
    async with Generation(["a", "b"], 60, lambda _: None, ReadTurns()) as generation:
        generation.put(token("a"))
        generation.put(token("b", FinishReason.STOP))
        generation.put(RequestOutput(request_id="a", finish_reason=reason))
        batches = [[(o.request_id, o.finish_reason) for o in batch] async for batch in generation.batches()]
    assert batches == [[("a", None), ("b", FinishReason.STOP)], [("a", reason)]]


async def test_what_a_reader_wants_no_more_of_is_forgotten() -> None:
    aborted: list[str] = []
    held: list[int] = []
    async with Generation(["a", "b"], 60, aborted.extend, ReadTurns()) as generation:
        generation.on_held = held.append
        generation.put(token("a"))
        generation.put(token("b", FinishReason.STOP))
        generation.abort(["a"])
        assert aborted == ["a"]
        generation.put(token("a"))
        assert [o.request_id async for batch in generation.batches() for o in batch] == ["b"]
    assert sum(held) == 0


async def test_a_failure_behind_the_end_that_the_reader_found_is_none() -> None:
    """This happens if a stop string is in the outputs before the engine died."""
    async with Generation(["a"], 60, lambda _: None, ReadTurns()) as generation:
        generation.put(token("a"))
        generation.fail(EngineDead("gone"))
        batches = generation.batches()
        assert len(await anext(batches)) == 1
        generation.abort(["a"])
        assert [batch async for batch in batches] == []


async def test_nothing_follows_a_last_output() -> None:
    async with Generation(["a"], 60, lambda _: None, ReadTurns()) as generation:
        generation.put(token("a", FinishReason.STOP))
        generation.put(token("a"))
        generation.put(token("a", FinishReason.ABORT))
        generation.fail(EngineDead("late"))
        assert [len(batch) async for batch in generation.batches()] == [1]


async def test_a_failure_comes_after_the_outputs_before_it() -> None:
    async with Generation(["a", "b"], 60, lambda _: None, ReadTurns()) as generation:
        generation.put(token("a"))
        generation.fail(EngineDead("gone"))
        batches = generation.batches()
        assert len(await anext(batches)) == 1
        with pytest.raises(EngineDead, match="gone"):
            await anext(batches)


async def test_a_failure_before_anything_was_read_is_raised() -> None:
    async with Generation(["a"], 60, lambda _: None, ReadTurns()) as generation:
        generation.fail(EngineDead("gone"))
        with pytest.raises(EngineDead):
            await anext(generation.batches())


async def test_time_ends_what_is_open_even_if_the_engine_is_silent() -> None:
    aborted: list[str] = []
    async with Generation(["a", "b"], 0.01, aborted.extend, ReadTurns()) as generation:
        generation.put(token("a", FinishReason.STOP))
        outputs = [output async for batch in generation.batches() for output in batch]
        assert [(o.request_id, o.finish_reason) for o in outputs] == [
            ("a", FinishReason.STOP),
            ("b", FinishReason.DEADLINE),
        ]
        assert aborted == ["a", "b"]


async def test_a_reader_waits_for_news() -> None:
    async with Generation(["a"], 60, lambda _: None, ReadTurns()) as generation:
        batches = generation.batches()
        waiting = asyncio.ensure_future(anext(batches))
        await asyncio.sleep(0)
        assert not waiting.done()
        generation.put(token("a", FinishReason.STOP))
        assert len(await waiting) == 1


async def test_a_whole_answer_at_once_is_read_a_few_tokens_at_a_time() -> None:
    """Static batching returns whole answers. Their processing must leave turns to other requests."""
    logprobs = [TokenLogprobs.of(i, 0.0, [], []) for i in range(1000)]
    whole = RequestOutput(
        request_id="a", new_token_ids=list(range(1000)), logprobs=logprobs, finish_reason=FinishReason.STOP
    )
    held: list[int] = []
    async with Generation(["a"], 60, lambda _: None, ReadTurns()) as generation:
        generation.on_held = held.append
        generation.put(whole)
        assert sum(held) > 1000 * 100
        batches = [batch async for batch in generation.batches()]
    outputs = [output for batch in batches for output in batch]
    assert max(len(output.new_token_ids) for output in outputs) <= 64
    assert [i for output in outputs for i in output.new_token_ids] == whole.new_token_ids
    assert [entry for output in outputs for entry in output.logprobs or ()] == logprobs
    assert [output.finish_reason for output in outputs if output.finish_reason] == [FinishReason.STOP]
    assert outputs[-1].finish_reason
    assert sum(held) == 0


@pytest.mark.parametrize("num_tokens", [0, 1, 64, 65, 128])
async def test_every_token_is_read_once(num_tokens: int) -> None:
    async with Generation(["a"], 60, lambda _: None, ReadTurns()) as generation:
        ids = list(range(num_tokens))
        generation.put(RequestOutput(request_id="a", new_token_ids=ids, finish_reason=FinishReason.LENGTH))
        assert [i async for batch in generation.batches() for o in batch for i in o.new_token_ids] == ids


async def test_of_many_readers_that_are_behind_one_goes_on_in_each_turn_of_the_loop() -> None:
    """Otherwise a new connection waits for a batch of each of them."""
    turns, most, read = ReadTurns(), 0, 0

    async def read_all() -> None:
        nonlocal read
        async with Generation(["a"], 60, lambda _: None, turns) as generation:
            ids = list(range(1000))
            generation.put(RequestOutput(request_id="a", new_token_ids=ids, finish_reason=FinishReason.LENGTH))
            async for _ in generation.batches():
                read += 1

    readers = [asyncio.create_task(read_all()) for _ in range(20)]
    await asyncio.sleep(0)  # each has its first batch
    for reader in readers[::3]:
        reader.cancel()  # and leaves no hole
    while not all(reader.done() for reader in readers):
        before = read
        await asyncio.sleep(0)
        most = max(most, read - before)
    assert most == 1
    assert sum(not reader.cancelled() for reader in readers) == 13
