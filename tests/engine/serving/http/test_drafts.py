"""Tests answers with drafts over HTTP: several tokens of a step in one event, stop strings among them, and metrics."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engine.processes import EngineServer

SAME = {"logit_bias": {"64": 100}, "max_tokens": 60, "temperature": 0}  # the same token again and again


@pytest.fixture(scope="module")
def drafting(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    with EngineServer(tmp_path_factory.mktemp("drafts"), chat_model, speculation="ngram") as started:
        yield started.wait_ready()


def complete(server: EngineServer, **changes: Any) -> dict[str, Any]:
    answer: dict[str, Any] = server.post(
        "/v1/completions", {"model": "tiny", "prompt": "the", **SAME, **changes}
    ).json()
    return answer


def test_an_answer_with_drafts_is_whole_and_the_metrics_count_them(drafting: EngineServer) -> None:
    answer = complete(drafting, n=2, logprobs=1)
    texts = [choice["text"] for choice in answer["choices"]]
    assert len({*texts}) == 1
    assert texts[0] == texts[0][0] * 60
    assert answer["usage"]["completion_tokens"] == 120
    assert [len(choice["logprobs"]["tokens"]) for choice in answer["choices"]] == [60, 60]
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    drafts, tokens, accepted = (drafting.metric(f"vllm:spec_decode_{name}_total") for name in names)
    assert 0 < drafts <= accepted <= tokens
    assert drafting.metric("conveyor_engine_steps_total") < 60


def test_a_stop_string_among_drafts_ends_the_answer_where_it_would_end_without_them(drafting: EngineServer) -> None:
    letter = complete(drafting)["choices"][0]["text"][0]
    answer = complete(drafting, logit_bias={"64": 20}, stop=letter * 7)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["text"] == ""
    assert answer["usage"]["completion_tokens"] == 7


def test_a_stream_has_every_token(drafting: EngineServer) -> None:
    response = drafting.post("/v1/completions", {"model": "tiny", "prompt": "the", **SAME, "stream": True})
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
    texts = ["".join(choice["text"] for choice in json.loads(line)["choices"]) for line in lines]
    assert "".join(texts) == complete(drafting)["choices"][0]["text"]
    assert 0 < len([text for text in texts if text]) < 40, "several tokens come in one event"


def chat(server: EngineServer, **fields: Any) -> Any:
    body = {"messages": [{"role": "user", "content": "the"}], "max_tokens": 40, "temperature": 0, **fields}
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    return response.json()


def test_an_answer_that_the_client_predicts_is_the_same_and_its_usage_counts_the_drafts(
    drafting: EngineServer, server: EngineServer
) -> None:
    plain = chat(drafting)
    content = plain["choices"][0]["message"]["content"]
    assert "completion_tokens_details" not in plain["usage"]
    for text in (content, [{"type": "text", "text": content}]):
        answer = chat(drafting, prediction={"type": "content", "content": text})
        assert answer["choices"][0]["message"]["content"] == content
        details = answer["usage"].pop("completion_tokens_details")
        assert answer["usage"] == plain["usage"]
        assert details["accepted_prediction_tokens"] > 3  # the text of random tokens has other tokens
        assert details["rejected_prediction_tokens"] >= 0
    page = (Path(__file__).parents[4] / "docs/speculation.md").read_text()
    shown = json.loads(page.partition("  -d '")[2].partition("'\n")[0])
    assert "completion_tokens_details" in chat(drafting, **shown)["usage"]
    body = {"messages": [{"role": "user", "content": "the"}], "prediction": {"type": "content", "content": [1]}}
    assert drafting.post("/v1/chat/completions", body).json()["error"]["param"] == "prediction.content"


def test_a_prediction_longer_than_the_context_is_truncated(drafting: EngineServer) -> None:
    content = chat(drafting)["choices"][0]["message"]["content"]
    answer = chat(drafting, prediction={"type": "content", "content": content + " the" * 60_000})
    assert answer["choices"][0]["message"]["content"] == content
    assert answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 3


def test_without_speculation_a_prediction_is_ignored_and_counted(server: EngineServer) -> None:
    chat(server, foo=1)
    before = server.metric("conveyor_engine_ignored_fields_total", kind="chat")
    answer = chat(server, prediction={"type": "content", "content": "the"})
    assert "completion_tokens_details" not in answer["usage"]
    assert server.metric("conveyor_engine_ignored_fields_total", kind="chat") == before + 1
