"""Tests which requests have the same prefix, and that those go to the same engine through a whole gateway."""

import base64
import json
import random
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from tests.gateway.builders import make_known_service
from tests.gateway.engine_servers import answering, running_engine
from tests.gateway.stack import Stack, post

from conveyor_api.adapters import ADAPTER_SLOTS
from conveyor_gateway.relaying import prefixes
from conveyor_gateway.relaying.bodies import MAX_ROUTED_BYTES, read_queue_fields
from conveyor_gateway.relaying.prefixes import MAX_BEGINNING_BYTES, MAX_MESSAGES, MAX_SYSTEM_BYTES, find_prefix

Json = dict[str, Any]
LONG = "x" * MAX_BEGINNING_BYTES
SERVICE = make_known_service("a/b")


def find(**body: Any) -> int | None:
    return find_prefix(read_queue_fields(json.dumps(body).encode()), SERVICE)


def turn(role: str, content: Any) -> Json:
    return {"role": role, "content": content}


SYSTEM = turn("system", "Be brief.")
HELLO = turn("user", "Hello")


def test_requests_with_an_adapter_have_one_home_if_not_all_adapters_fit_an_engine() -> None:
    def find_with(number: int, **body: Any) -> int | None:
        service = make_known_service("a/b", adapters=dict.fromkeys(f"a{each}" for each in range(number)))
        return find_prefix(read_queue_fields(json.dumps(body).encode()), service)

    many = ADAPTER_SLOTS + 1
    assert len({find_with(many, prompt=text, model=model) for text in "xy" for model in ("b:a1", "a1")}) == 1
    assert find_with(many, prompt="x", model="a1") != find_with(many, prompt="x", model="a2")
    assert len({find_with(many, prompt=text, model=model) for text in "xy" for model in ("b", "b:none")}) == 4
    assert find_with(ADAPTER_SLOTS, prompt="x", model="a1") != find_with(ADAPTER_SLOTS, prompt="y", model="a1")


def test_each_turn_of_a_conversation_has_the_prefix_of_the_first() -> None:
    begin = [turn("system", "Be brief."), HELLO]
    turns = [begin, [*begin, turn("assistant", "Hi"), turn("user", "And now?")]]
    assert len({find(messages=messages, temperature=number) for number, messages in enumerate(turns)}) == 1
    assert find(messages=turns[0]) is not None
    in_input = [{"type": "message", **message} for message in begin]
    assert find(input=in_input) == find(input=[*in_input, turn("assistant", "Hi")])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"messages": [turn("user", "a")]}, {"messages": [turn("user", "b")]}),
        ({"messages": [turn("system", f"{LONG}a"), HELLO]}, {"messages": [turn("system", f"{LONG}b"), HELLO]}),
        ({"messages": [turn("developer", "a")]}, {"messages": [turn("developer", "a"), turn("user", "b")]}),
        ({"prompt": "a"}, {"prompt": "b"}),
        ({"prompt": [1, 2]}, {"prompt": [1, 3]}),
        ({"input": "a"}, {"input": "b"}),
        ({"input": "a", "instructions": "b"}, {"input": "a", "instructions": "c"}),
        ({"messages": [turn("user", "a")], "system": "b"}, {"messages": [turn("user", "a")], "system": "c"}),
        ({"prompt": "a", "cache_salt": "b"}, {"prompt": "a", "cache_salt": "c"}),
        ({"prompt": "a", "prompt_cache_key": "b"}, {"prompt": "a", "prompt_cache_key": "c"}),
        ({"prompt": "a", "model": "m:b"}, {"prompt": "a", "model": "m:c"}),
    ],
)  # fmt: skip
def test_requests_that_share_no_cached_prompt_have_different_prefixes(one: Json, other: Json) -> None:
    assert len({find(**one), find(**other), None}) == 3


def test_of_long_texts_the_beginning_counts() -> None:
    assert find(prompt=LONG + "a") == find(prompt=LONG + "b")
    assert find(messages=[turn("user", LONG + "a")]) == find(messages=[turn("user", LONG + "b")])


def picture(data: bytes, kind: str) -> Json:
    """An image with 2 KB of metadata that all images of a camera have, as each API sends it."""
    encoded = base64.b64encode(bytes(2000) + data).decode()
    if kind == "anthropic":
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": encoded}}
    url = f"data:image/png;base64,{encoded}"
    return {"type": "image_url", "image_url": {"url": url}} if kind == "chat" else {"type": kind, "image_url": url}


@pytest.mark.parametrize("kind", ["chat", "input_image", "anthropic"])
@pytest.mark.parametrize("num_bytes", [100, 1000, 100_000])
def test_images_that_begin_alike_have_different_prefixes(kind: str, num_bytes: int) -> None:
    numbers = random.Random(0)
    data = numbers.randbytes(num_bytes)
    other = numbers.randbytes(num_bytes)
    question, next_question = ({"type": "text", "text": f"{text} {'x' * 3000}"} for text in ("What is it?", "And now?"))

    def of(*parts: Json) -> int | None:
        return find(messages=[SYSTEM, turn("user", [*parts])])

    assert of(picture(data, kind), question) != of(picture(other, kind), question)
    assert of(picture(data, kind), question) != of(picture(data[:-1], kind), question), "also if only the end differs"
    assert of(picture(data, kind), question) == of(picture(data, kind), next_question)
    assert of(picture(data, kind), question) == of(picture(data, kind), picture(other, kind))


@pytest.mark.parametrize("text", ["word " * 1000, "\u4f60\u597d" * 1000, "\\/" * 2000, "a\n" * 2000])
def test_of_a_text_in_parts_the_beginning_counts(text: str) -> None:
    one, other = (find(messages=[turn("user", [{"type": "text", "text": text + end}])]) for end in "ab")
    assert one == other


def test_a_number_as_long_as_an_image_is_no_error() -> None:
    for body in (b'{"prompt":%b}', b'{"messages":[{"role":"user","content":%b}]}'):
        find_prefix(read_queue_fields(body % (b"1" * 5000)), SERVICE)


def test_slashes_may_be_escaped_in_an_image() -> None:
    """As PHP does."""
    image = b'{"messages":[{"role":"user","content":[{"type":"image_url","image_url":"data:image/png;base64,%b"}]}]}'
    data = base64.b64encode(random.Random(0).randbytes(2400)).replace(b"/", b"\\/")
    bodies = [image % (data + end * 100) for end in (b"AAAA", b"BBBB")]
    assert len({find_prefix(read_queue_fields(body), SERVICE) for body in bodies}) == 2


@pytest.mark.parametrize("word", ["0123456789abcdef" * 20, "ACGT" * 100, "x" * 400])
def test_a_text_with_a_long_word_has_the_home_of_its_beginning(word: str) -> None:
    start = "A text. " * 110 + word  # the beginning ends within the word
    assert find(prompt=f"{start} What?") == find(prompt=f"{start} Why?") is not None


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{}", b"[]", b"{",
        b'{"prompt": "a", "max_tokens": "many"}', b'{"prompt": "%s"}' % (b"x" * MAX_ROUTED_BYTES),
    ],
)  # fmt: skip
def test_a_body_without_a_prompt_or_that_is_not_read_has_no_prefix(body: bytes) -> None:
    assert find_prefix(read_queue_fields(body), SERVICE) is None


@pytest.mark.parametrize("messages", [[None], [1, "a"], [[]], [{"role": 1}], "text", {"role": "user"}])
def test_messages_of_any_form_are_read(messages: Any) -> None:
    assert find(messages=messages) is not None


@pytest.mark.parametrize(
    ("messages", "num_decoded"),
    [
        ([SYSTEM] * 20_000, MAX_MESSAGES),
        ([SYSTEM, HELLO] + [SYSTEM] * 20_000, 2),
        ([{}] * 50_000, 1),
        ([1] * 300_000, 0),
        ([[]] * 50_000, 0),
    ],
)
def test_few_messages_of_a_long_list_are_decoded(messages: list[Any], num_decoded: int) -> None:
    assert find(messages=messages) is not None
    assert len(prefixes._decoded) == num_decoded


def test_nested_content_of_any_depth_is_no_error() -> None:
    for depth in range(600, 1100):
        for body in (b'{"messages":[{"role":"user","content":%b}]}', b'{"prompt":%b}'):
            find_prefix(read_queue_fields(body % (b"[" * depth + b"]" * depth)), SERVICE)


def test_of_long_system_messages_the_beginning_counts() -> None:
    long = "x" * MAX_SYSTEM_BYTES
    one, other = ([turn("system", long + each), HELLO] for each in "ab")
    assert find(messages=one) == find(messages=other)
    assert find(messages=one) != find(messages=[turn("system", long), turn("user", "Bye")])
    assert find(system=long + "a", messages=[HELLO]) == find(system=long + "b", messages=[HELLO])


async def test_the_turns_of_conversations_stay_at_their_engines(stack: Stack, http: aiohttp.ClientSession) -> None:
    answers = [answering(web.json_response, data={"engine": number}) for number in range(3)]
    async with (
        running_engine(answers[0]) as one,
        running_engine(answers[1]) as two,
        running_engine(answers[2]) as three,
    ):
        for engine in (one, two, three):
            await stack.add_engine(engine.port)
        engines_of: list[set[int]] = []
        for number in range(12):
            messages, engines = [turn("system", "Be brief."), turn("user", f"Question {number}")], set()
            for _ in range(3):
                status, answer, _ = await post(
                    http, f"{stack.url}/chat/completions", json.dumps({"messages": messages}).encode()
                )
                assert status == 200
                engines.add(answer["engine"])
                messages += [turn("assistant", "Yes."), turn("user", "And?")]
            engines_of.append(engines)
    assert all(len(engines) == 1 for engines in engines_of), engines_of
    assert len(set.union(*engines_of)) == 3
