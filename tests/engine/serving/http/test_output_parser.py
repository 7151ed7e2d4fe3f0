"""Tests a parser that divides an answer into fields. The fields do not depend on the chunks or on streaming.

The parser is the tests' own. Those of the engine are tested in `tests/engine/text/parsing`.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conveyor_engine.serving.generation import Generation, ReadTurns
from conveyor_engine.serving.http.app_state import AppState
from conveyor_engine.serving.http.engine_response import Opened
from conveyor_engine.serving.http.memory import Memory
from conveyor_engine.serving.metrics import EngineMetrics
from conveyor_engine.tasks.generate.preparing.prepare import PreparedChoice, PreparedText
from conveyor_engine.tasks.generate.serving.chat import ChatFormat
from conveyor_engine.tasks.generate.serving.choice import Delta
from conveyor_engine.tasks.generate.serving.formats import Usage, WholeChoice
from conveyor_engine.tasks.generate.serving.generated import GeneratedResponse
from conveyor_engine.text.parsing.build import NO_PARSING, Parsing
from conveyor_engine.text.parsing.interface import PLAIN_TEXT, CallIds, Part
from conveyor_engine.text.tokenizer import Tokenizer
from conveyor_engine.wire.request import FinishReason, RequestOutput, TokenLogprobs

OPEN, CLOSE = "<think>", "</think>"
TEXTS = st.lists(st.sampled_from(("a", "é", "<", ">", "/", "<thi", "nk>", OPEN, CLOSE, "END", "EN")), max_size=12)
CUTS = st.lists(st.integers(0, 60), max_size=8)
MAX_TOKENS = 200


class Think:
    """A parser: text between OPEN and CLOSE is reasoning, and other text is content."""

    def __init__(self) -> None:
        self._held = ""
        self._thinks = False

    def feed(self, text: str) -> Sequence[Part]:
        parts = list[Part]()
        self._held += text
        while True:
            before, mark, after = self._held.partition(CLOSE if self._thinks else OPEN)
            if not mark:
                break
            parts += self._emit(before)
            self._held, self._thinks = after, not self._thinks
        mark = CLOSE if self._thinks else OPEN
        num_held = max(length for length in range(len(mark)) if before.endswith(mark[:length]))
        certain, self._held = before[: len(before) - num_held], before[len(before) - num_held :]
        return [*parts, *self._emit(certain)]

    def finish(self) -> Sequence[Part]:
        return self._emit(self._held)

    def _emit(self, text: str) -> list[Part]:
        return [("reasoning" if self._thinks else "content", text)] if text else []


def split(text: str) -> dict[str, str]:
    """Return the fields of the whole text."""
    fields = {"content": "", "reasoning": ""}
    rest, thinks = text, False
    while rest:
        before, _, rest = rest.partition(CLOSE if thinks else OPEN)
        fields["reasoning" if thinks else "content"] += before
        thinks = not thinks
    return fields


def chunks(items: Any, cuts: list[int]) -> list[Any]:
    bounds = [0, *sorted(min(cut, len(items)) for cut in cuts), len(items)]
    return [items[start:end] for start, end in pairwise(bounds)]


def joined(parts: Sequence[Part]) -> dict[str, str]:
    fields = {"content": "", "reasoning": ""}
    for name, text in parts:
        fields[name] += text
    return fields


@given(TEXTS, CUTS)
def test_whatever_the_chunks_the_fields_are_the_same(texts: list[str], cuts: list[int]) -> None:
    whole, parser = "".join(texts), Think()
    parts = [part for chunk in chunks(whole, cuts) if chunk for part in parser.feed(chunk)]
    assert joined([*parts, *parser.finish()]) == split(whole)


@given(TEXTS, CUTS)
def test_plain_text_is_content_at_once(texts: list[str], cuts: list[int]) -> None:
    for chunk in chunks("".join(texts), cuts):
        assert not chunk or PLAIN_TEXT.feed(chunk) == (("content", chunk),)
    assert PLAIN_TEXT.finish() == ()


@pytest.fixture
def thinking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the server use the parser, by replacing the choice of a format."""
    monkeypatch.setattr(ChatFormat, "build_parser", lambda _: Think())


def outputs_of(tokens: list[int], cuts: list[int], *, has_logprobs: bool, has_end: bool) -> Iterator[RequestOutput]:
    """Yield outputs as the engine sends them. A token's log probability is minus its position."""
    pieces, places = chunks(tokens, cuts), count()
    if has_end:
        pieces[-1] = [*pieces[-1], 0]
    for number, piece in enumerate(pieces):
        is_last = number == len(pieces) - 1
        end = FinishReason.STOP if has_end else FinishReason.LENGTH
        logprobs = [TokenLogprobs.of(token, -next(places), [], []) for token in piece] if has_logprobs else None
        yield RequestOutput(
            request_id="a", new_token_ids=piece, logprobs=logprobs, finish_reason=end if is_last else None
        )


def prepare(
    tokenizer: Tokenizer, *, stream: bool, stop: tuple[str, ...] = (), logprobs: bool = False, parsing: Parsing
) -> tuple[AppState, PreparedText]:
    request = PreparedChoice(
        request_id="a", arrival_time=0.0, num_prompt_tokens=1, prompt_tail=[5], max_tokens=MAX_TOKENS, min_tokens=0
    )
    prepared = PreparedText(
        id="chatcmpl-1", model="tiny", stream=stream, include_usage=False, continuous_usage=False, stop=stop,
        top_logprobs=0 if logprobs else None, choices=[request], choices_per_prompt=1, num_prompt_tokens=1,
        reports_cached_tokens=False, ignored_fields=0, parts=[], parsing=parsing,
    )  # fmt: skip
    model = SimpleNamespace(name="tiny", tokenizer=tokenizer, find_adapter=lambda name: 0, adapter_in=lambda name: "")
    state = SimpleNamespace(model=model, metrics=EngineMetrics("tiny"), memory=Memory(2**30))
    return cast(AppState, state), prepared


async def serve(
    tokenizer: Tokenizer,
    outputs: Iterator[RequestOutput],
    *,
    stream: bool,
    stop: tuple[str, ...] = (),
    logprobs: bool = False,
    parsing: Parsing = NO_PARSING,
) -> bytes:
    """Return the body of the response that GeneratedResponse makes from the outputs."""
    state, prepared = prepare(tokenizer, stream=stream, stop=stop, logprobs=logprobs, parsing=parsing)
    generation = Generation(["a"], 600.0, lambda _: None, ReadTurns())
    response = GeneratedResponse(Opened(state, prepared, generation, 0.0, 600.0), ChatFormat)

    async def batches() -> AsyncIterator[list[RequestOutput]]:
        for output in outputs:
            yield [output]
            if response._choices[0].finish_reason is not None:
                break

    generation.batches = batches  # type: ignore[method-assign]
    body = b""

    async def send(message: Any) -> None:
        nonlocal body
        body += message.get("body", b"")

    async with generation, response._held:
        await response._send_answer(send)
    return body


def read(body: bytes, *, stream: bool) -> tuple[dict[str, str], list[Any], str]:
    """Return the fields, the tokens with log probabilities, and the finish reason."""
    if stream:
        events = [json.loads(line.removeprefix("data: ")) for line in body.decode().split("\n\n")[:-2]]
    else:
        events = [json.loads(body)]
    choices = [event["choices"][0] for event in events]
    messages = [choice["delta" if stream else "message"] for choice in choices]
    assert [message.get("role") for message in messages] == ["assistant", *[None] * (len(messages) - 1)]
    fields = {name: "".join(m.get(name) or "" for m in messages) for name in ("content", "reasoning")}
    tokens = [token for choice in choices if choice["logprobs"] for token in choice["logprobs"]["content"]]
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    return fields, tokens, choices[-1]["finish_reason"]


@pytest.mark.usefixtures("thinking")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("has_logprobs", [False, True])
def test_fields_stop_strings_and_log_probabilities_agree_for_any_outputs(
    chat_model: Path, stream: bool, has_logprobs: bool
) -> None:
    """A stop string is removed before the parser sees the text, wherever it is in the answer."""
    tokenizer = Tokenizer(chat_model)

    @given(TEXTS, CUTS, st.sampled_from(((), ("END",))), st.booleans())
    def check(texts: list[str], cuts: list[int], stop: tuple[str, ...], has_end: bool) -> None:
        text = "".join(texts)
        ids = tokenizer.encode(text, MAX_TOKENS)
        outputs = outputs_of(ids, cuts, has_logprobs=has_logprobs, has_end=has_end)
        served = serve(tokenizer, outputs, stream=stream, stop=stop, logprobs=has_logprobs)
        fields, tokens, reason = read(asyncio.run(served), stream=stream)
        before, stopped, _ = text.partition("END") if stop else (text, "", "")
        assert fields == split(before)
        assert reason == ("stop" if stopped or has_end else "length")
        assert [-token["logprob"] for token in tokens] == list(range(len(tokens))), "each once, in order"
        if has_logprobs:
            shown = b"".join(bytes(token["bytes"]) for token in tokens)
            assert shown.startswith(before.encode()) if stopped else len(tokens) == len(ids) + has_end

    check()


@pytest.mark.usefixtures("thinking")
def test_a_stream_sends_each_part_as_soon_as_it_is_certain(chat_model: Path) -> None:
    """An output that is only the beginning of a mark causes no event."""
    tokenizer = Tokenizer(chat_model)
    texts = ["a", "<th", "ink>", "b", "</", "x"]
    ids = [tokenizer.encode(text, MAX_TOKENS) for text in texts]
    cuts = [sum(map(len, ids[: number + 1])) for number in range(len(ids) - 1)]
    outputs = outputs_of([token for each in ids for token in each], cuts, has_logprobs=False, has_end=False)
    body = asyncio.run(serve(tokenizer, outputs, stream=True))
    events = [json.loads(line[6:]) for line in body.decode().split("\n\n")[:-2]]
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas == [
        {"role": "assistant", "content": "a"},
        *[{"reasoning": text, "reasoning_content": text} for text in ("b", "</x")],
    ]


def test_a_field_that_the_format_does_not_have_is_no_silence(chat_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChatFormat, "build_parser", lambda _: Think())
    monkeypatch.setattr(Think, "_emit", lambda _, text: [("thought", text)])
    tokenizer = Tokenizer(chat_model)
    for stream in (False, True):
        outputs = outputs_of(tokenizer.encode(OPEN + "a", 99), [], has_logprobs=False, has_end=True)
        with pytest.raises(AttributeError, match="thought"):
            asyncio.run(serve(tokenizer, outputs, stream=stream))


@pytest.mark.parametrize("stream", [False, True])
def test_text_that_is_held_for_a_mark_is_sent_if_a_stop_string_ends_the_answer(chat_model: Path, stream: bool) -> None:
    tokenizer = Tokenizer(chat_model)
    outputs = outputs_of(tokenizer.encode("Hi <tool_caENDx", MAX_TOKENS), [7, 9], has_logprobs=False, has_end=True)
    served = serve(tokenizer, outputs, stream=stream, stop=("END",), parsing=Parsing(tool_format="hermes"))
    fields, _, reason = read(asyncio.run(served), stream=stream)
    assert (fields["content"], reason) == ("Hi <tool_ca", "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_the_calls_of_each_choice_have_numbers_of_their_own(chat_model: Path, stream: bool) -> None:
    parsing = Parsing(tool_format="kimi_k2", call_ids="numbered", num_earlier_calls=2)
    made = ChatFormat(*prepare(Tokenizer(chat_model), stream=stream, parsing=parsing))
    calls: list[Part] = [("tool_call", "f"), ("arguments", "{}")] * 2
    deltas, wholes = [Delta(choice, calls, [], "stop", 1) for choice in (0, 1)], [WholeChoice(0), WholeChoice(1)]
    for delta, whole in zip(deltas, wholes, strict=True):
        whole.add(delta)
    events = (made.write_events(each, None) for each in deltas)
    body = b"".join(events if stream else made.write_whole(wholes, Usage(1, 1, 2, None)))
    assert re.findall(r"functions.f:(\d)", body.decode()) == ["2", "3"] * 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("call_ids", "pattern"),
    [("random", "call_[0-9a-f]{32}"), ("short", "[0-9a-f]{9}"), ("numbered", "functions.f:2 functions.f:3")],
)
def test_ids_of_calls_look_as_the_template_expects_them(
    chat_model: Path, stream: bool, call_ids: CallIds, pattern: str
) -> None:
    tokenizer = Tokenizer(chat_model)
    parsing = Parsing(tool_format="hermes", call_ids=call_ids, num_earlier_calls=2)
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>' * 2
    outputs = outputs_of(tokenizer.encode(text, MAX_TOKENS), [], has_logprobs=False, has_end=True)
    body = asyncio.run(serve(tokenizer, outputs, stream=stream, parsing=parsing))
    assert re.search(pattern, " ".join(re.findall(r'"id":"((?!chatcmpl)[^"]+)"', body.decode())))
