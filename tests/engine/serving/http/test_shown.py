"""Tests, on a real server, how tokens are chosen and which details about them the response has."""

import json
from typing import Any

import pytest
from tests.engine.processes import EngineServer

PROMPT = "the fox"
LIMITED: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "temperature": 1, "seed": 4}


def send(server: EngineServer, path: str = "completions", **fields: Any) -> Any:
    """Return the answer's choice. For a chat it also has the response's `prompt_token_ids`."""
    question = {"prompt": PROMPT} if path == "completions" else {"messages": [{"role": "user", "content": PROMPT}]}
    response = server.post(f"/v1/{path}", {**question, **LIMITED, **fields})
    assert response.status_code == 200, response.text
    answer = response.json()
    return {"prompt_token_ids": answer.get("prompt_token_ids"), **answer["choices"][0]}


def ids_of(server: EngineServer, path: str = "completions", **fields: Any) -> list[int]:
    ids: list[int] = send(server, path, return_token_ids=True, **fields)["token_ids"]
    return ids


def refusal(server: EngineServer, path: str = "completions", **fields: Any) -> Any:
    question = {"prompt": PROMPT} if path == "completions" else {"messages": [{"role": "user", "content": PROMPT}]}
    response = server.post(f"/v1/{path}", {**question, **fields})
    assert response.status_code == 400
    return response.json()["error"]


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_biases_allowed_tokens_and_bad_words_limit_what_is_chosen(server: EngineServer, path: str) -> None:
    free = ids_of(server, path, temperature=0)
    first = str(free[0])
    assert ids_of(server, path, temperature=0, logit_bias={first: -100})[0] != free[0]
    assert set(ids_of(server, path, logit_bias={"77": 100})) == {77}
    assert set(ids_of(server, path, allowed_token_ids=[70, 71, 72])) == {70, 71, 72}
    tokens = send(server, temperature=0, logprobs=0, return_token_ids=True)
    word, banned = next(
        (text, token_id)
        for text, token_id in zip(tokens["logprobs"]["tokens"], tokens["token_ids"], strict=True)
        if text.isascii() and text.isalpha()
    )
    assert banned not in ids_of(server, path, temperature=0, max_tokens=100, bad_words=[word])


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_penalties_keep_a_greedy_answer_from_repeating_itself(server: EngineServer, path: str) -> None:
    """This holds too if steps also have requests without a penalty or with a different one."""
    loop = {"temperature": 0, "allowed_token_ids": list(range(60, 70)), "max_tokens": 10}
    assert len(set(ids_of(server, path, **loop, logit_bias={"61": 20}))) == 1
    for penalty in ({"presence_penalty": 2}, {"frequency_penalty": 2}):
        spread = ids_of(server, path, **loop, **penalty)
        assert len(set(spread)) > len(set(ids_of(server, path, **loop))) or len(set(spread)) > 5


def test_min_p_one_takes_the_likeliest(server: EngineServer) -> None:
    assert ids_of(server, min_p=1, temperature=1.5) == ids_of(server, temperature=0)


def test_parameters_that_forbid_every_token_end_a_request_with_a_reason(server: EngineServer) -> None:
    body = {"prompt": PROMPT, "allowed_token_ids": [70], "stop_token_ids": [70], "min_tokens": 3}
    response = server.post("/v1/completions", body)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "invalid_value")
    assert "together forbid all tokens" in error["message"]
    assert len(ids_of(server)) == 24, "the next one is served"


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize("ending", [{}, {"stop_token_ids": list(range(100, 228)), "ignore_eos": False}])
def test_token_ids_are_all_that_were_generated_streamed_alike(
    server: EngineServer, path: str, ending: dict[str, Any]
) -> None:
    whole = send(server, path, return_token_ids=True, **ending)
    question = {"prompt": PROMPT} if path == "completions" else {"messages": [{"role": "user", "content": PROMPT}]}
    body = {**question, **LIMITED, **ending, "return_token_ids": True, "stream": True}
    lines = server.post(f"/v1/{path}", {**body, "stream_options": {"include_usage": True}}).text.split("\n\n")
    *chunks, last = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    streamed = [token_id for chunk in chunks for token_id in chunk["choices"][0].get("token_ids", ())]
    assert streamed == whole["token_ids"]
    assert len(streamed) == last["usage"]["completion_tokens"]
    shown = [
        ids
        for chunk in chunks
        for ids in (chunk.get("prompt_token_ids"), chunk["choices"][0].get("prompt_token_ids"))
        if ids
    ]
    assert shown == [whole["prompt_token_ids"]]
    assert len(shown[0]) == last["usage"]["prompt_tokens"]


def test_token_ids_end_with_the_token_that_completes_a_stop_string(server: EngineServer) -> None:
    ids, text = ids_of(server), send(server)["text"]
    stop = next(text[i : i + 2] for i in range(6, 20) if text[i : i + 2].isascii())
    cut = send(server, stop=stop, return_token_ids=True)
    assert cut["token_ids"] == ids[: len(cut["token_ids"])] != ids


@pytest.mark.parametrize("stream", [False, True])
def test_the_stop_string_and_the_stop_token_are_shown_if_they_are_wanted(server: EngineServer, stream: bool) -> None:
    def text_of(**fields: Any) -> str:
        response = server.post("/v1/completions", {"prompt": PROMPT, **LIMITED, **fields, "stream": stream})
        lines = response.text.split("\n\n")[:-2] if stream else [response.text]
        return "".join(json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines)

    text = text_of()
    stop = text[8:11]
    end = text.index(stop)
    assert text_of(stop=stop) == text[:end]
    assert text_of(stop=stop, include_stop_str_in_output=True) == text[: end + 3]
    only = {"allowed_token_ids": [80, 0], "logit_bias": {"0": 5}, "ignore_eos": False, "max_tokens": 400}
    plain = text_of(**only)
    assert text_of(**only, include_stop_str_in_output=True) == plain
    assert text_of(**only, include_stop_str_in_output=True, skip_special_tokens=False) == plain + "<|end|>"
    assert "<|user|>" in text_of(allowed_token_ids=[1, 80], skip_special_tokens=False)


def test_log_probabilities_of_named_tokens_are_theirs(server: EngineServer) -> None:
    both = {"logprobs": True, "max_tokens": 3}
    best = send(server, "chat/completions", **both, top_logprobs=20)["logprobs"]["content"]
    named = send(server, "chat/completions", **both, logprob_token_ids=[9, 200, 7], return_tokens_as_token_ids=True)
    for token, other in zip(named["logprobs"]["content"], best, strict=True):
        expected_names = ["token_id:9", "token_id:200", "token_id:7"]
        chosen = [] if token["token"] in expected_names else [token["token"]]
        assert [top["token"] for top in token["top_logprobs"]] == expected_names + chosen
        assert token["logprob"] == pytest.approx(other["logprob"])
        known = {tuple(top["bytes"]): top["logprob"] for top in other["top_logprobs"]}
        assert all(top["logprob"] == token["logprob"] for top in token["top_logprobs"][3:])
        for top in token["top_logprobs"][:3]:
            expected = known.get(tuple(top["bytes"]))
            assert (
                top["logprob"] == pytest.approx(expected)
                if expected is not None
                else top["logprob"] < min(known.values())
            )


def test_completions_name_tokens_by_their_ids_if_requested(server: EngineServer) -> None:
    answer = send(server, logprobs=2, return_tokens_as_token_ids=True, return_token_ids=True)
    names = [f"token_id:{token_id}" for token_id in answer["token_ids"]]
    assert answer["logprobs"]["tokens"] == names
    assert all(name in top for name, top in zip(names, answer["logprobs"]["top_logprobs"], strict=True))
    named = send(server, logprobs=0, logprob_token_ids=[5], return_tokens_as_token_ids=True)
    assert all("token_id:5" in top for top in named["logprobs"]["top_logprobs"])


def test_an_answer_continues_the_last_message(server: EngineServer) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "the qui"}]
    body = {"messages": messages, **LIMITED, "continue_final_message": True, "add_generation_prompt": False}
    chat = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    assert chat == send(server, prompt="<|user|>a<|end|><|assistant|>the qui")["text"]
    shown = server.post("/v1/chat/completions", body | {"echo": True}).json()["choices"][0]["message"]["content"]
    assert shown == f"the qui{chat}"
    lines = server.post("/v1/chat/completions", body | {"echo": True, "stream": True}).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == shown
    begun = {**body, "continue_final_message": False, "add_generation_prompt": True, "echo": True}
    answer = server.post("/v1/chat/completions", begun).json()["choices"][0]["message"]["content"]
    assert not answer.startswith("the qui")


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"),
    [
        ("completions", {"logprobs": -1}, "logprobs", "name the tokens in logprob_token_ids"),
        ("chat/completions", {"logprobs": True, "top_logprobs": -1}, "top_logprobs", "must not be -1"),
        ("completions", {"logprob_token_ids": [5]}, "logprob_token_ids", "together with logprobs"),
        ("chat/completions", {"logprob_token_ids": [5]}, "logprob_token_ids", "together with logprobs"),
        ("completions", {"logprobs": 1, "logprob_token_ids": [384]}, "logprob_token_ids", "0 to 383"),
        ("completions", {"logprobs": 1, "logprob_token_ids": [1] * 129}, "logprob_token_ids", "at most 128"),
        ("completions", {"best_of": 3}, "best_of", "send `n`"),
        ("completions", {"use_beam_search": True}, "use_beam_search", "send `n`"),
        (
            "chat/completions",
            {"continue_final_message": True, "add_generation_prompt": True},
            "add_generation_prompt",
            "exclude each other",
        ),
    ],
)
def test_what_is_refused_is_refused_with_a_reason(
    server: EngineServer, path: str, fields: dict[str, Any], param: str, words: str
) -> None:
    error = refusal(server, path, **fields)
    assert error["param"] == param
    assert words in error["message"]
