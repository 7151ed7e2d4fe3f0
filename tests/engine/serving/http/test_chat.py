"""Tests /v1/chat/completions on a real server."""

from typing import Any

import pytest
from openai import BadRequestError, OpenAI
from tests.engine.chat_model import CONTEXT_TOKENS
from tests.engine.processes import EngineServer

MESSAGES: Any = [{"role": "user", "content": "the fox"}]


@pytest.fixture
def client(server: EngineServer) -> Any:
    with OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as opened:
        yield opened


def test_an_answer_is_the_assistants(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=5)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert isinstance(answer.choices[0].message.content, str)


def test_chat_is_the_rendered_template_completed(server: EngineServer) -> None:
    rest = {"max_tokens": 20, "temperature": 0}
    chat = server.post("/v1/chat/completions", {"messages": MESSAGES} | rest).json()
    prompt = "<|user|>the fox<|end|><|assistant|>"
    completion = server.post("/v1/completions", {"prompt": prompt} | rest).json()
    assert chat["choices"][0]["message"]["content"] == completion["choices"][0]["text"]
    assert chat["usage"]["prompt_tokens"] == completion["usage"]["prompt_tokens"]


def test_a_stream_begins_with_the_role_and_ends_with_the_reason(client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_completion_tokens=12, seed=2, stream=True,
        stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
    )  # fmt: skip
    *chunks, last = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert chunks[-1].choices[0].finish_reason == "length"
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 12
    whole = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=12, seed=2, extra_body={"ignore_eos": True}
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content


def test_a_lone_surrogate_in_the_history_becomes_the_replacement_character(server: EngineServer) -> None:
    """Agents that cut a text within an emoji send it again in each turn."""

    def count(content: bytes) -> int:
        body = b'{"messages": [{"role": "user", "content": "%s"}], "max_tokens": 1}' % content
        answer = server.post("/v1/chat/completions", body)
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["prompt_tokens"])

    assert count(rb"the \ud83d...") == count(rb"the \ufffd...")


def test_an_empty_model_counts_as_absent(client: OpenAI) -> None:
    """As clients send it whose users enter none; so does vLLM."""
    assert client.chat.completions.create(model="", messages=MESSAGES, max_tokens=1).model == "tiny"


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_have_bytes_and_alternatives(client: OpenAI, stream: bool) -> None:
    options: Any = {
        "logprobs": True,
        "top_logprobs": 2,
        "temperature": 0,
        "max_tokens": 8,
        "extra_body": {"ignore_eos": True},
    }
    answer: Any = client.chat.completions.create(model="tiny", messages=MESSAGES, stream=stream, **options)
    choices = [c for chunk in answer for c in chunk.choices] if stream else answer.choices
    tokens = [token for choice in choices if choice.logprobs for token in choice.logprobs.content]
    assert len(tokens) == 8
    for token in tokens:
        assert len(token.top_logprobs) == 2
        assert token.logprob == token.top_logprobs[0].logprob
        assert bytes(token.bytes).decode(errors="replace") == token.token


def test_an_answer_without_a_limit_may_fill_the_context(server: EngineServer) -> None:
    """The request ends only at its deadline, because nothing else limits it."""
    body = {"messages": MESSAGES, "ignore_eos": True}
    response = server.post("/v1/chat/completions", body, **{"X-Request-Timeout-Seconds": "0.3"})
    assert response.status_code == 504


def test_messages_the_template_refuses_are_the_clients_fault(client: OpenAI) -> None:
    messages: Any = [{"role": "system", "content": "x"}, *MESSAGES]
    with pytest.raises(BadRequestError, match="no system here"):
        client.chat.completions.create(model="tiny", messages=messages)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "user", "content": "a" * 1_000_000}]}, "messages"),
        ({"messages": [{"role": "user", "content": "a" * CONTEXT_TOKENS}]}, "messages"),
        ({"max_completion_tokens": CONTEXT_TOKENS}, "max_completion_tokens"),
        ({"max_tokens": CONTEXT_TOKENS}, "max_tokens"),
    ],
)
def test_what_does_not_fit_is_named_as_the_client_named_it(
    server: EngineServer, fields: dict[str, Any], param: str, stream: bool
) -> None:
    response = server.post("/v1/chat/completions", {"messages": MESSAGES, "stream": stream} | fields)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param)
    if param != "messages":
        assert f"you requested {CONTEXT_TOKENS} output tokens" in error["message"]
    words = f"This model's maximum context length is {CONTEXT_TOKENS} tokens"
    assert error["message"].startswith(words), "litellm knows the case by these words"


def test_what_the_stream_helper_ends_with_may_be_sent_back(client: OpenAI) -> None:
    """The helper's message has `parsed: null` and other null fields."""
    soon: Any = {"stop_token_ids": list(range(128))}
    with client.chat.completions.stream(model="tiny", messages=MESSAGES, seed=1, extra_body=soon) as stream:
        message = stream.get_final_completion().choices[0].message
    history: Any = [*MESSAGES, message.model_dump(), *MESSAGES]
    assert {"parsed", "tool_calls", "refusal"} <= history[1].keys()
    assert client.chat.completions.create(model="tiny", messages=history, max_tokens=4).choices


def test_variables_reach_the_template_unless_the_engine_sets_them(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match=r"chat_template_kwargs.messages is not for requests to set"):
        client.chat.completions.create(
            model="tiny", messages=MESSAGES, extra_body={"chat_template_kwargs": {"messages": []}}
        )
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=2, extra_body={"chat_template_kwargs": {"enable_thinking": False}}
    )
    assert answer.choices


def test_an_answer_longer_than_one_piece_is_whole(server: EngineServer) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 200, "n": 2, "ignore_eos": True}
    response = server.post("/v1/chat/completions", {**body, "logprobs": True, "top_logprobs": 20})
    assert response.headers["transfer-encoding"] == "chunked"
    assert [len(choice["logprobs"]["content"]) for choice in response.json()["choices"]] == [200, 200]
