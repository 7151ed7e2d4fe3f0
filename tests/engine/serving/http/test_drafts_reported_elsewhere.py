"""What users of other engines reported of drafts, tried over HTTP: with drafts, each answer is the one without them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engine.processes import EngineServer

TEXT = "the cat sat on the mat and the cat sat on the mat and the cat sat on the "
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}},
}
CACHED = "vllm:prefix_cache_hits_total"


@pytest.fixture(scope="module")
def drafting(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    """A server with drafts, whose answers repeat themselves."""
    folder = tmp_path_factory.mktemp("drafts")
    with EngineServer(folder, chat_model, speculation="ngram", dtype="float32", tool_parser="hermes") as started:
        yield started.wait_ready()


@pytest.fixture(scope="module")
def plain(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    with EngineServer(tmp_path_factory.mktemp("plain"), chat_model, dtype="float32", tool_parser="hermes") as started:
        yield started.wait_ready()


def post(server: EngineServer, path: str, **fields: Any) -> Any:
    answer = server.post(path, {"temperature": 0, "max_tokens": 40, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def compare(drafting: EngineServer, plain: EngineServer, path: str = "/v1/completions", **fields: Any) -> Any:
    """Return the choices with drafts, which are those without them, and were computed with drafts."""
    drafted = "vllm:spec_decode_num_accepted_tokens_total"
    before = drafting.metric(drafted)
    ours, theirs = (post(server, path, **fields) for server in (drafting, plain))
    assert drafting.metric(drafted) > before, "there were drafts"
    for answer in (ours, theirs):
        answer["usage"].pop("completion_tokens_details", None)
    assert ours["usage"] == theirs["usage"]
    assert ours["choices"] == theirs["choices"]
    return ours["choices"]


# vllm#17876: the log probabilities of accepted drafts were all 0.
def test_log_probabilities_of_accepted_drafts_are_those_without(drafting: EngineServer, plain: EngineServer) -> None:
    fields = {"prompt": TEXT, "logit_bias": {"64": 8}, "logprobs": 3, "max_tokens": 30}
    before = drafting.metric("vllm:spec_decode_num_accepted_tokens_total")
    ours, theirs = (post(server, "/v1/completions", **fields)["choices"][0] for server in (drafting, plain))
    assert drafting.metric("vllm:spec_decode_num_accepted_tokens_total") > before
    assert ours["text"] == theirs["text"]
    assert ours["logprobs"]["tokens"] == theirs["logprobs"]["tokens"]
    assert ours["logprobs"]["token_logprobs"] == pytest.approx(theirs["logprobs"]["token_logprobs"], abs=1e-3)
    assert len({*ours["logprobs"]["token_logprobs"]}) > 1


# vllm#47616: tokens and log probabilities after a stop string among accepted drafts were sent.
@pytest.mark.parametrize("stream", [False, True])
def test_nothing_follows_a_stop_string_among_drafts(drafting: EngineServer, plain: EngineServer, stream: bool) -> None:
    fields = {"prompt": "the", "logit_bias": {"64": 100}, "logprobs": 1, "return_token_ids": True, "max_tokens": 60}
    letter = post(plain, "/v1/completions", **fields)["choices"][0]["text"][0]
    fields |= {"logit_bias": {"64": 30}, "stop": letter * 11, "include_stop_str_in_output": True}
    if not stream:
        (choice,) = compare(drafting, plain, **fields)
        assert choice["text"] == letter * 11
        assert len(choice["logprobs"]["tokens"]) == len(choice["token_ids"]) == 11
        return
    for server in (drafting, plain):
        lines = server.post("/v1/completions", {"temperature": 0, **fields, "stream": True}).text.splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        choices = [choice for event in events for choice in event["choices"]]
        assert "".join(choice["text"] for choice in choices) == letter * 11
        assert sum(len(choice["token_ids"] or ()) for choice in choices) == 11
        assert sum(len((choice["logprobs"] or {"tokens": ()})["tokens"]) for choice in choices) == 11


# vllm#40875, vllm#56077: guesses from the definitions of tools made calls of other tokens.
def test_definitions_of_tools_in_the_prompt_change_no_answer(drafting: EngineServer, plain: EngineServer) -> None:
    messages = [{"role": "user", "content": TEXT}]
    fields = {"messages": messages, "tools": [TOOL], "tool_choice": "auto", "logit_bias": {"64": 6}}
    (choice,) = compare(drafting, plain, "/v1/chat/completions", **fields)
    assert choice["message"]["content"] or choice["message"]["tool_calls"]


# vllm#53670, vllm#54360, sglang#32459: with drafts, fewer tokens of a prompt came from the prefix cache.
def test_prompts_hit_the_prefix_cache_as_often(drafting: EngineServer, plain: EngineServer) -> None:
    hits = []
    for server in (drafting, plain):
        before = server.metric(CACHED)
        for turn in range(3):
            post(server, "/v1/completions", prompt="hits " + TEXT * (4 + turn), logit_bias={"64": 100})
        hits.append(server.metric(CACHED) - before)
    assert hits[0] == hits[1] > 0


# vllm#6306: log probabilities of the prompt were refused beside drafts.
def test_log_probabilities_of_the_prompt_are_those_without(drafting: EngineServer, plain: EngineServer) -> None:
    fields = {"prompt": TEXT, "prompt_logprobs": 1, "logit_bias": {"64": 100}, "max_tokens": 20}
    ours, theirs = (post(server, "/v1/completions", **fields)["choices"][0] for server in (drafting, plain))
    assert ours["text"] == theirs["text"]
    numbers = [
        [each[token]["logprob"] for each in choice["prompt_logprobs"][1:] for token in sorted(each)]
        for choice in (ours, theirs)
    ]
    assert numbers[0] == pytest.approx(numbers[1], abs=1e-3)


# vllm#41758 and others: sampled answers with a seed changed with drafts.
def test_sampled_answers_with_a_seed_are_those_without(drafting: EngineServer, plain: EngineServer) -> None:
    fields = {"prompt": TEXT, "temperature": 1.0, "seed": 7, "n": 3, "logit_bias": {"64": 9}, "presence_penalty": 0.5}
    choices = compare(drafting, plain, **fields)
    assert len({choice["text"] for choice in choices}) > 1
