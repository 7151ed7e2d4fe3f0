"""Tests log probabilities of prompts' tokens, and echoed prompts, against transformers' numbers."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.engine.processes import EngineServer

PROMPT = [5, 77, 80, 200, 300, 12, 12, 13, 150, 151, 99, 64, 250, 31, 7, 40, 41, 42, 43, 44, 45]


@pytest.fixture(scope="module")
def expected(chat_model: Path) -> list[list[float]]:
    """Return the log probabilities of all tokens for each position of the prompt except the first one."""
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(chat_model, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT])).logits[0]
    values: list[list[float]] = logits.double().log_softmax(-1)[:-1].tolist()
    return values


def check(found: list[Any], expected: list[list[float]], num_top: int) -> None:
    """Check log probabilities in vLLM's format."""
    assert found[0] is None
    for token_id, found_values, values in zip(PROMPT[1:], found[1:], expected, strict=True):
        best = sorted(range(len(values)), key=values.__getitem__, reverse=True)
        assert set(found_values) == {str(i) for i in [token_id, *best[:num_top]]}
        for each in found_values:
            assert found_values[each]["logprob"] == pytest.approx(values[int(each)], abs=1e-4)
            assert found_values[each]["rank"] == best.index(int(each)) + 1
        assert found_values[str(token_id)]["decoded_token"] is not None


@pytest.mark.parametrize("num_top", [0, 3])
def test_they_are_those_of_transformers_however_often_the_prompt_is_cached(
    server: EngineServer, expected: list[list[float]], num_top: int
) -> None:
    body = {"prompt": PROMPT, "max_tokens": 3, "prompt_logprobs": num_top, "temperature": 0}
    for _ in range(2):
        choice = server.post("/v1/completions", body).json()["choices"][0]
        check(choice["prompt_logprobs"], expected, num_top)
        assert choice["logprobs"] is None
    bare = server.post("/v1/completions", body | {"prompt_logprobs": None}).json()["choices"][0]
    assert bare["text"] == choice["text"]


def test_each_prompt_and_each_choice_has_its_own(server: EngineServer, expected: list[list[float]]) -> None:
    body = {"prompt": [[9], PROMPT], "max_tokens": 2, "prompt_logprobs": 1, "n": 2}
    choices = server.post("/v1/completions", body).json()["choices"]
    assert [choice["prompt_logprobs"] for choice in choices[:2]] == [[None], [None]]
    for choice in choices[2:]:
        check(choice["prompt_logprobs"], expected, 1)


def test_a_chat_has_them_once(server: EngineServer) -> None:
    body = {"messages": [{"role": "user", "content": "the fox"}], "max_tokens": 2, "prompt_logprobs": 2, "n": 2}
    answer = server.post("/v1/chat/completions", body | {"return_token_ids": True}).json()
    assert len(answer["prompt_logprobs"]) == len(answer["prompt_token_ids"])
    found_values = zip(answer["prompt_token_ids"], answer["prompt_logprobs"], strict=True)
    assert all(str(token_id) in each for token_id, each in found_values if each is not None)
    assert "prompt_logprobs" not in answer["choices"][0]
    assert server.post("/v1/chat/completions", body | {"prompt_logprobs": None}).json()["prompt_logprobs"] is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_shown_comes_before_the_answer(
    server: EngineServer, expected: list[list[float]], stream: bool
) -> None:
    """lm-eval reads this format: one list whose first entry is null."""
    body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    plain = read(server.post("/v1/completions", body | {"stream": stream}), stream=stream)
    shown = read(server.post("/v1/completions", body | {"echo": True, "stream": stream}), stream=stream)
    assert shown["text"].endswith(plain["text"])
    prompt_text = shown["text"].removesuffix(plain["text"])
    logprobs = shown["logprobs"]
    assert {len(column) for column in logprobs.values()} == {len(PROMPT) + 4}
    assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
    for place, values in enumerate(expected, 1):
        assert logprobs["token_logprobs"][place] == pytest.approx(values[PROMPT[place]], abs=1e-4)
        assert max(logprobs["top_logprobs"][place].values()) == pytest.approx(max(values), abs=1e-4)
    for name in ("tokens", "token_logprobs", "top_logprobs"):
        assert logprobs[name][len(PROMPT) :] == plain["logprobs"][name]
    offsets = logprobs["text_offset"]
    assert offsets == sorted(offsets)
    assert offsets[len(PROMPT)] == len(prompt_text)


def read(response: httpx.Response, *, stream: bool) -> Any:
    """Return the only choice, with its parts joined."""
    if not stream:
        return response.json()["choices"][0]
    parts = [json.loads(line[6:])["choices"][0] for line in response.text.split("\n\n") if line.startswith("data: {")]
    logprobs: dict[str, list[Any]] = {}
    for part in parts:
        for name, column in (part["logprobs"] or {}).items():
            logprobs.setdefault(name, []).extend(column)
    return {"text": "".join(part["text"] for part in parts), "logprobs": logprobs}


def test_a_text_is_shown_as_it_was_sent(server: EngineServer) -> None:
    body = {"prompt": ["naïve 日本 ", "b"], "max_tokens": 3, "echo": True, "n": 2, "ignore_eos": True}
    texts = [choice["text"] for choice in server.post("/v1/completions", body).json()["choices"]]
    assert [text.startswith("naïve 日本 ") for text in texts] == [True, True, False, False]
    assert all(text.startswith("b") for text in texts[2:])


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_stream_has_none(server: EngineServer, path: str) -> None:
    question = {"prompt": "a"} if path == "completions" else {"messages": [{"role": "user", "content": "a"}]}
    response = server.post(f"/v1/{path}", {**question, "prompt_logprobs": 1, "stream": True})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt_logprobs")


def test_more_than_an_answer_may_hold_are_refused(server: EngineServer) -> None:
    body = {"prompt": [[5] * 8000] * 4, "n": 64, "prompt_logprobs": 20}
    response = server.post("/v1/completions", body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] in ("logprobs", "n")


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_is_scored_without_an_answer(server: EngineServer, stream: bool) -> None:
    """As programs that measure perplexity ask for it."""
    body = {"prompt": PROMPT, "echo": True, "logprobs": 1, "temperature": 0}
    one = server.post("/v1/completions", body | {"max_tokens": 1, "ignore_eos": True}).json()["choices"][0]
    answer = server.post("/v1/completions", body | {"max_tokens": 0, "stream": stream})
    none = read(answer, stream=stream)
    assert none["logprobs"] == {name: values[:-1] for name, values in one["logprobs"].items()}
    assert one["text"].startswith(none["text"])
    if not stream:
        assert none["finish_reason"] == "length"
        usage = answer.json()["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(PROMPT), 0)


def test_without_echo_an_answer_has_a_token_at_least(server: EngineServer) -> None:
    error = server.post("/v1/completions", {"prompt": "a", "max_tokens": 0}).json()["error"]
    assert (error["param"], error["code"]) == ("max_tokens", "invalid_value")
