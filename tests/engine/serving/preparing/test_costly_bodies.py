"""Tests that costly bodies leave workers to others, and that forms that were too costly are rejected without one."""

import json
from typing import Any

import pytest
from tests.engine.builders import make_facts
from tests.engine.serving.preparing.test_lanes import LONG, started

from conveyor_engine import registry
from conveyor_engine.errors import ErrorCode, InvalidRequest, UnknownModel
from conveyor_engine.serving.preparing import costly_forms
from conveyor_engine.serving.preparing import pool as pool_module
from conveyor_engine.serving.preparing.chat_schemas import ChatRequest
from conveyor_engine.serving.preparing.completion_schemas import CompletionRequest
from conveyor_engine.serving.preparing.costly_forms import CostlyForms, find_form, has_form
from conveyor_engine.serving.preparing.jobs import Lane, find_kinds
from conveyor_engine.serving.preparing.lanes import find_lanes
from conveyor_engine.tasks.generate.preparing.messages_schemas import MessagesRequest
from conveyor_engine.tasks.generate.preparing.responses_schemas import ResponsesRequest
from conveyor_engine.wire.worker import Job

SCHEMA = {"type": "object"}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
FORMS: list[dict[str, Any]] = [
    {"structured_outputs": {"regex": "a"}}, {"guided_json": {"type": "auto"}}, {"guided_regex": "a"},
    {"guided_choice": ["a"]}, {"guided_grammar": "a"}, {"json_schema": SCHEMA}, {"regex": "a"}, {"ebnf": "a"},
    {"response_format": {"type": "json_object"}}, {"text": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, {"tool_choice": "required"},
    {"tool_choice": {"type": "any"}}, {"tool_choice": {"type": "function", "function": {"name": "f"}}},
]  # fmt: skip
NO_FORMS: list[dict[str, Any]] = [
    {}, {"response_format": None}, {"response_format": {"type": "text"}}, {"text": {"verbosity": "low"}},
    {"text": {"format": {"type": "text"}}}, {"output_config": {"effort": "low"}}, {"tools": TOOLS},
    {"tools": TOOLS, "tool_choice": "auto"}, {"tool_choice": {"type": "auto"}}, {"tool_choice": "none"},
    {"prompt": 'a "guided_json" of "regex": {}'},
]  # fmt: skip
TEMPLATES = {"chat", "messages", "responses", "count_tokens", "tokenize"}
LANES = {
    **dict.fromkeys(["completion", "chat", "messages", "responses"], Lane.FORMS),
    **dict.fromkeys(
        ["edits", "embedding_of_images", "images", "image_tensors", "transcription", "translation"], Lane.FILES
    ),
    **dict.fromkeys([f"{name}_with_images" for name in TEMPLATES], Lane.FILES),
}
PLAIN = {
    *("tokenize", "detokenize", "decode", "count_tokens", "classify", "classify_tokens", "predict", "embedding"),
    *("embed", "embed_all", "embed_sparse", "pooling", "rerank", "score", "either_rerank", "pictures", "tensors"),
}


def write(name: str, **fields: Any) -> bytes:
    return json.dumps({"prompt": name, **fields}).encode()


def form(number: int) -> dict[str, Any]:
    return {"structured_outputs": {"regex": f"a{{{number}}}"}}


@pytest.mark.parametrize("kind", ["completion", "chat"])
async def test_bodies_with_a_form_have_one_worker_and_all_plain_ones_pass_them(kind: str) -> None:
    async with started() as pool:
        forms = [write(f"form {number}", **form(number)).decode() for number in range(12)]
        pool.send(*forms, kind=kind)
        await pool.given(forms[0])
        plain = [write(f"plain {number}").decode() for number in range(8)]
        pool.send(*plain)
        pool.send("chat", kind="chat")
        await pool.given(forms[0], *plain[:2])
        for done, following in zip(plain, plain[2:], strict=False):
            pool.workers.answer(done)
            await pool.until(lambda name=following: name in pool.workers.jobs)
        pool.workers.answer(plain[-2])
        pool.workers.answer(plain[-1])
        await pool.given(forms[0], "chat")
        pool.workers.answer(forms[0])
        await pool.given(forms[1], "chat")


async def test_images_have_one_worker_and_all_texts_pass_them() -> None:
    async with started() as pool:
        images = [json.dumps({"input": [f"data:{number}"], "modality": "image"}) for number in range(12)]
        texts = [json.dumps({"input": f"text {number}"}) for number in range(6)]
        pool.send(*images, kind="embedding_of_images", task="embed")
        await pool.given(images[0])
        pool.send(*texts[:3], kind="embedding_of_images", task="embed")
        pool.send(*texts[3:], kind="embed", task="embed")
        await pool.given(images[0], *texts[:2])
        for done, following in zip(texts, texts[2:], strict=False):
            pool.workers.answer(done)
            await pool.until(lambda name=following: name in pool.workers.jobs)
        assert images[0] in pool.workers.jobs
        assert images[1] not in pool.workers.jobs


async def test_files_have_all_workers_of_a_service_that_has_nothing_else() -> None:
    async with started() as pool:
        pool.send(*"abcd", kind="images", task="imageclassify")
        await pool.given("a", "b", "c")


def test_each_costly_kind_names_its_lane() -> None:
    found = {name: kind for task in registry.find_packages() for name, kind in find_kinds(task).items()}
    assert {name: kind.lane for name, kind in found.items()} == {**LANES, **dict.fromkeys(PLAIN)}
    with_images = {f"{name}_with_images" for name in TEMPLATES}
    assert {name for name, kind in found.items() if kind.runs_template} == TEMPLATES | with_images


@pytest.mark.parametrize("fields", FORMS)
def test_a_body_with_a_form_is_found(fields: dict[str, Any]) -> None:
    body = write("a", **fields)
    assert has_form(body)
    (name,) = fields
    assert has_form(body.replace(name.encode(), b"\\u%04x" % ord(name[0]) + name[1:].encode())), "an escaped name"
    assert has_form(body.replace(b"{", b'{"temperature": NaN, ', 1)), "what only pydantic reads"
    assert Lane.FORMS in find_lanes(Job("chat", make_facts(), 1, 0.0, body))
    assert find_lanes(Job("completion", make_facts(), 1, 0.0, body.ljust(LONG))) == {Lane.LONG}


@pytest.mark.parametrize("fields", NO_FORMS)
def test_a_body_without_a_form_is_plain(fields: dict[str, Any]) -> None:
    assert not find_lanes(Job("completion", make_facts(), 1, 0.0, write("a", **fields)))


@pytest.mark.parametrize("schema", [CompletionRequest, ChatRequest, MessagesRequest, ResponsesRequest])
def test_each_field_that_may_require_a_form_is_searched(schema: Any) -> None:
    names = ("format", "guided", "regex", "grammar", "ebnf", "schema", "structured", "tool_choice", "output", "text")
    looked = {name for name in schema.model_fields if any(word in name for word in names)}
    assert looked - {"include_stop_str_in_output", "max_output_tokens"} <= {*costly_forms._Body.__struct_fields__}


def test_the_form_of_a_call_includes_the_tools() -> None:
    one, other = (write("a", tool_choice="required", tools=[name]) for name in "ab")
    assert find_form(one) != find_form(other)
    assert find_form(one) == find_form(write("b", tool_choice="required", tools=["a"]))


@pytest.mark.parametrize("dies", [True, False])
async def test_a_form_that_was_too_costly_needs_no_worker_again(dies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "cpu_seconds", lambda _: 0.0)
    async with started() as pool:
        same = [write(f"{number}", **form(1)).decode() for number in range(3)]
        other = write("other", **form(2)).decode()
        pool.send(*same, other)
        await pool.given(same[0])
        if dies:
            pool.workers.kill(same[0])
        else:
            error = InvalidRequest("x", code=ErrorCode.PROMPT_TOO_COSTLY)
            pool.workers.answer(same[0], error=error)
        await pool.given(other)
        later = write("later", **form(1)).decode()
        pool.send(later)
        for name in (*same, later):
            with pytest.raises(InvalidRequest, match="simplify it") as refused:
                await pool.prepared[name]
            assert refused.value.code == ErrorCode.FORM_TOO_COSTLY
        await pool.given(other)


async def test_a_form_is_not_the_cause_of_a_death_before_its_time_was_up() -> None:
    async with started() as pool:
        same = [write(f"{number}", **form(1)).decode() for number in range(2)]
        pool.send(*same)
        await pool.given(same[0])
        pool.workers.kill(same[0])
        await pool.given(same[1])
        pool.workers.answer(same[1])
        with pytest.raises(UnknownModel):
            await pool.prepared[same[1]]


def test_costly_forms_are_forgotten_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costly_forms, "REMEMBERED_MAX", 2)
    now = 0.0
    forms = CostlyForms(lambda: now)
    assert all(forms.note(write("a", **form(number))) for number in range(3))
    assert [forms.has(write("b", **form(number))) for number in range(3)] == [False, True, True]
    assert not forms.note(write("a" * 20_000, **form(3))), "the prompt may be the cause"
    assert not forms.has(write("a", **form(3)))
    now = costly_forms.REMEMBERED_SECONDS
    assert not forms.has(write("b", **form(2)))
