"""Tests /v1/completions on a real server, with OpenAI's client if it supports the request."""

import json
from typing import Any

import httpx
import pytest
from openai import BadRequestError, NotFoundError, OpenAI
from tests.engine.chat_model import CONTEXT_TOKENS, VOCABULARY
from tests.engine.processes import EngineServer

LONG: dict[str, Any] = {"prompt": "a", "max_tokens": 8000, "ignore_eos": True}


@pytest.fixture
def client(server: EngineServer) -> Any:
    with OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as opened:
        yield opened


def events(response: httpx.Response) -> list[Any]:
    """Return the data of each server-sent event. Checks that the last one is [DONE]."""
    data = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert data[-1] == "[DONE]"
    return [json.loads(line) for line in data[:-1]]


def test_an_answer_has_text_reason_and_counts(client: OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="the fox", max_tokens=5, temperature=0)
    assert answer.object == "text_completion"
    assert answer.choices[0].finish_reason in ("length", "stop")
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 5
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_says_the_same_as_the_whole(server: EngineServer) -> None:
    body = {"prompt": "the fox", "max_tokens": 60, "temperature": 1, "seed": 5, "ignore_eos": True}
    whole = server.post("/v1/completions", body).json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = events(server.post("/v1/completions", body | options))
    assert "".join(c["choices"][0]["text"] for c in chunks if c["choices"]) == whole["choices"][0]["text"]
    assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]][-1] == "length"
    usage = whole["usage"] | {"prompt_tokens_details": chunks[-1]["usage"]["prompt_tokens_details"]}
    assert chunks[-1] == {**chunks[0], "choices": [], "usage": usage}
    assert all(c["usage"] is None for c in chunks[:-1])


def test_each_chunk_has_its_choice_s_usage_so_far_if_requested(server: EngineServer) -> None:
    """It is counted as in vLLM: for each choice with its prompt, and for the whole answer at the end."""
    body = {"prompt": [[5, 6, 7], [8]], "n": 2, "max_tokens": 20, "temperature": 1, "seed": 5, "ignore_eos": True}
    options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    *chunks, last = events(server.post("/v1/completions", body | options))
    for index in range(4):
        usages = [c["usage"] for c in chunks if c["choices"][0]["index"] == index]
        counts = [usage["completion_tokens"] for usage in usages]
        assert counts == sorted(counts)
        assert counts[-1] == 20
        assert {usage["prompt_tokens"] for usage in usages} == {3 if index < 2 else 1}
        assert all(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] for usage in usages)
    assert (last["choices"], last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == ([], 4, 80)


def test_without_the_option_a_stream_has_no_usage(server: EngineServer) -> None:
    chunks = events(server.post("/v1/completions", {"prompt": "a", "max_tokens": 3, "stream": True}))
    assert all("usage" not in chunk for chunk in chunks)


def test_streamed_text_is_whole_characters(server: EngineServer) -> None:
    """A random model generates random bytes, but each event must be JSON in valid UTF-8, without surrogates."""
    body = {"prompt": "日本", "max_tokens": 200, "temperature": 1.5, "seed": 3, "stream": True, "ignore_eos": True}
    response = server.post("/v1/completions", body)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    response.content.decode("utf-8", "strict")
    assert len(events(response)) > 20


def test_the_same_seed_gives_the_same_text(client: OpenAI) -> None:
    texts = [client.completions.create(model="tiny", prompt="a", max_tokens=20, seed=9).choices[0].text for _ in "ab"]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("cut", [{"top_k": 1}, {"top_p": 1e-9}])
def test_the_narrowest_cut_leaves_the_likeliest_tokens(server: EngineServer, cut: dict[str, Any]) -> None:
    assert text_of(server, temperature=2, **cut) == text_of(server, temperature=0) != text_of(server, temperature=2)


def test_what_is_left_out_is_the_whole_distribution_at_temperature_1(server: EngineServer) -> None:
    whole = text_of(server, temperature=1, top_k=-1, top_p=1)
    assert text_of(server) == text_of(server, temperature=None, top_k=None, top_p=None) == whole
    assert text_of(server, temperature=0.9) != whole


def text_of(server: EngineServer, **fields: Any) -> str:
    """Return the text of forty tokens of the same prompt and seed."""
    body = {"prompt": "the fox", "max_tokens": 40, "seed": 1, "ignore_eos": True, **fields}
    return str(server.post("/v1/completions", body).json()["choices"][0]["text"])


def test_choices_and_prompts_are_numbered_in_order(client: OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=["a", "b"], n=2, max_tokens=4, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    alone = client.completions.create(model="tiny", prompt="b", n=2, max_tokens=4, seed=1)
    assert [c.text for c in answer.choices[2:]] == [c.text for c in alone.choices]
    assert answer.choices[0].text != answer.choices[1].text


def test_streamed_choices_each_end_once(server: EngineServer) -> None:
    body = {"prompt": "a", "n": 3, "max_tokens": 6, "stream": True, "ignore_eos": True}
    ends = [
        (c["index"], c["finish_reason"])
        for chunk in events(server.post("/v1/completions", body))
        for c in chunk["choices"]
        if c["finish_reason"]
    ]
    assert sorted(ends) == [(0, "length"), (1, "length"), (2, "length")]


@pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6], [7]]])
def test_token_ids_are_taken_as_they_are(client: OpenAI, prompt: Any) -> None:
    answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=1)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 3


def test_a_stop_string_ends_the_text_before_it(server: EngineServer) -> None:
    body = {"prompt": "the fox", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    text = server.post("/v1/completions", body).json()["choices"][0]["text"]
    stop = text[10:13]
    for stream in (False, True):
        response = server.post("/v1/completions", body | {"stop": stop, "stream": stream})
        choices = [c for e in (events(response) if stream else [response.json()]) for c in e["choices"]]
        assert "".join(c["text"] for c in choices) == text[: text.index(stop)]
        assert choices[-1]["finish_reason"] == "stop"
    server.wait_load(running=0, waiting=0)


def test_a_stop_token_ends_the_answer_and_min_tokens_keeps_it_away(server: EngineServer) -> None:
    body = {"prompt": "the fox", "max_tokens": 400, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    body |= {"stop_token_ids": list(range(128))}
    early = server.post("/v1/completions", body).json()
    late = server.post("/v1/completions", body | {"min_tokens": 30}).json()
    assert early["choices"][0]["finish_reason"] == late["choices"][0]["finish_reason"] == "stop"
    assert early["usage"]["completion_tokens"] <= 30 < late["usage"]["completion_tokens"]
    # the token that ended it is counted, but is no part of the text
    assert len(late["choices"][0]["logprobs"]["tokens"]) == late["usage"]["completion_tokens"]


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_each_token_has_log_probabilities_the_end_token_too(server: EngineServer, path: str, stream: bool) -> None:
    """The format is vLLM's. A chunk without a token has null, not an empty list."""
    chat = path.startswith("chat")
    body = {"seed": 3, "max_tokens": 900, "stop_token_ids": list(range(128)), "stream": stream}
    body |= (
        {"messages": [{"role": "user", "content": "a"}], "logprobs": True} if chat else {"prompt": "a", "logprobs": 0}
    )
    body |= {"stream_options": {"include_usage": True}} if stream else {}
    answer = server.post(f"/v1/{path}", body)
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    answers = [json.loads(line) for line in lines] if stream else [answer.json()]
    choices = [choice for each in answers for choice in each["choices"]]
    assert choices[-1]["finish_reason"] == "stop"
    logprobs = [
        choice["logprobs"]["content" if chat else "tokens"] for choice in choices if choice["logprobs"] is not None
    ]
    assert all(logprobs)
    assert sum(map(len, logprobs)) == answers[-1]["usage"]["completion_tokens"]
    if not chat:
        last, text = choices[-1]["logprobs"], "".join(choice["text"] for choice in choices)
        assert last["text_offset"][-1] == len(text)
        assert last["top_logprobs"][-1] == {last["tokens"][-1]: last["token_logprobs"][-1]}


def test_logprobs_have_the_chosen_and_the_likeliest_tokens(client: OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="the", max_tokens=6, logprobs=3, temperature=0)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) > 0
    for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert logprob <= 0
        assert token in top
        assert logprob == max(top.values())  # greedy


def test_the_time_limit_of_the_header_ends_a_request(server: EngineServer) -> None:
    before = server.metric("vllm:generation_tokens_total")
    response = server.post("/v1/completions", LONG, **{"X-Request-Timeout-Seconds": "0.3"})
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "deadline_exceeded"
    server.wait_load(running=0, waiting=0)
    assert server.metric("vllm:generation_tokens_total") - before < LONG["max_tokens"]


def test_in_a_stream_that_has_begun_the_time_limit_is_an_event(server: EngineServer) -> None:
    before = server.metric("vllm:generation_tokens_total")
    may_end = {**LONG, "ignore_eos": False, "logit_bias": {"0": -100, "1": -100}}  # else it is dropped, being too long
    response = server.post("/v1/completions", may_end | {"stream": True}, **{"X-Request-Timeout-Seconds": "2"})
    assert response.status_code == 200
    last = response.text.strip().split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
    server.wait_load(running=0, waiting=0)
    assert server.metric("vllm:generation_tokens_total") - before < LONG["max_tokens"]


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon"])
def test_a_senseless_time_limit_is_refused(server: EngineServer, value: str) -> None:
    response = server.post("/v1/completions", {"prompt": "a"}, **{"X-Request-Timeout-Seconds": value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "X-Request-Timeout-Seconds"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"prompt": "a" * 9000}, "prompt", f"maximum context length is {CONTEXT_TOKENS} tokens. However, your"),
        ({"prompt": [5] * CONTEXT_TOKENS}, "prompt", f"{CONTEXT_TOKENS} tokens"),
        ({"prompt": [5, 6], "max_tokens": CONTEXT_TOKENS}, "max_tokens", "for a total of 8194 tokens"),
        ({"prompt": [VOCABULARY]}, "prompt", f"0 to {VOCABULARY - 1}"),
        ({"stop_token_ids": [VOCABULARY]}, "stop_token_ids", f"0 to {VOCABULARY - 1}"),
        ({"min_tokens": 17}, "min_tokens", "max_tokens is 16"),
        ({"prompt": ["a"] * 100, "n": 100}, "n", "that this engine accepts at once"),
        ({"prompt": ""}, "prompt", "empty"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_with_numbers(
    server: EngineServer, fields: dict[str, Any], param: str, words: str
) -> None:
    response = server.post("/v1/completions", {"prompt": "a"} | fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert words in response.json()["error"]["message"]


def test_a_field_that_nobody_defines_is_ignored_and_counted(server: EngineServer) -> None:
    def count() -> float:
        return server.metric("conveyor_engine_ignored_fields_total", kind="completion")

    assert server.post("/v1/completions", {"prompt": "a", "user": "me"}).status_code == 200
    before = count()
    assert server.post("/v1/completions", {"prompt": "a", "foo": 1, "temprature": {}, "user": "me"}).status_code == 200
    assert count() == before + 2
    assert "temprature" not in server.get("/metrics").text, "a client's word is no label"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"a"', b"\xff\xfe", b'{"prompt": "a"} x', b"[" * 100_000])
def test_what_is_no_json_object_is_refused(server: EngineServer, body: bytes) -> None:
    response = server.post("/v1/completions", body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_the_client_knows_the_errors(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="best_of is not supported"):
        client.completions.create(model="tiny", prompt="a", best_of=3)
    with pytest.raises(NotFoundError, match="'other' is not served here; 'tiny' is"):
        client.completions.create(model="other", prompt="a")


def test_an_answer_longer_than_one_piece_is_whole(server: EngineServer) -> None:
    body = {"prompt": "the", "max_tokens": 300, "n": 2, "logprobs": 20, "ignore_eos": True}
    response = server.post("/v1/completions", body)
    assert response.headers["transfer-encoding"] == "chunked"
    for index, choice in enumerate(response.json()["choices"]):
        logprobs = choice["logprobs"]
        assert (choice["index"], choice["finish_reason"]) == (index, "length")
        assert {name: len(column) for name, column in logprobs.items()} == dict.fromkeys(logprobs, 300)
        starts = logprobs["text_offset"]
        assert starts == sorted(starts)
        assert starts[-1] <= len(choice["text"])
