"""Tests the paths that rank with a causal model and its chat template, such as Qwen3-Reranker, on a real server."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.engine.processes import EngineServer
from tests.engine.scorers import Scored

CONTEXT_TOKENS = 512
QUERY = "the quick fox"
DOCUMENTS = ["the fox", "naïve café", "x", "the quick brown fox jumps over the lazy dog", "the fox", "<|end|> a", ""]


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Scored:
    return Scored("qwen3", tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def server(scored: Scored, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    folder = tmp_path_factory.mktemp("server")
    with EngineServer(folder, scored.directory, batching_mode="dynamic", max_num_seqs=4) as running:
        running.wait_ready()
        yield running


def sigmoid(logits: list[float]) -> list[float]:
    return torch.tensor(logits).sigmoid().tolist()


def scores_of(server: EngineServer, **body: Any) -> list[float]:
    answer = server.post("/v1/score", body)
    assert answer.status_code == 200, answer.text
    return [one["score"] for one in answer.json()["data"]]


def test_every_path_gives_the_scores_of_transformers(scored: Scored, server: EngineServer) -> None:
    prompts = [scored.token_ids(QUERY, document) for document in DOCUMENTS]
    expected = sigmoid([scored.logit(prompt) for prompt in prompts])
    assert max(expected) - min(expected) > 0.01, "the comparison could fail"
    answer = server.post("/v1/rerank", {"query": QUERY, "documents": DOCUMENTS}).json()
    found = {result["index"]: result["relevance_score"] for result in answer["results"]}
    assert [found[index] for index in range(len(DOCUMENTS))] == pytest.approx(expected, abs=1e-4)
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert scores_of(server, text_1=QUERY, text_2=DOCUMENTS) == pytest.approx(expected, abs=1e-4)
    ranks = server.post("/rerank", {"query": QUERY, "texts": DOCUMENTS}).json()
    assert [rank["score"] for rank in ranks] == pytest.approx(sorted(expected, reverse=True), abs=1e-4)
    assert list(server.get("/info").json()["model_type"]) == ["reranker"]


def test_logits_come_if_requested(scored: Scored, server: EngineServer) -> None:
    expected = [scored.logit(scored.token_ids(QUERY, document)) for document in DOCUMENTS]
    assert scores_of(server, text_1=QUERY, text_2=DOCUMENTS, use_activation=False) == pytest.approx(expected, abs=1e-4)


def test_an_instruction_replaces_the_models_own(scored: Scored, server: EngineServer) -> None:
    logit = scored.logit(scored.token_ids(QUERY, "x", "Find rhymes"))
    assert scores_of(server, text_1=QUERY, text_2="x", instruction="Find rhymes") == pytest.approx(
        sigmoid([logit]), abs=1e-4
    )
    refused = server.post("/v1/score", {"text_1": "a", "text_2": "b", "instruction": "a" * 5000}).json()["error"]
    assert (refused["code"], refused["param"]) == ("invalid_value", "instruction")


def test_a_pair_that_is_too_long_is_refused_or_keeps_the_end_of_the_template(
    scored: Scored, server: EngineServer
) -> None:
    long = "the lazy dog " * 400
    for body, param in (({"query": QUERY, "documents": ["x", long]}, "documents[1]"), ({"query": long}, "query")):
        error = server.post("/v1/rerank", {"documents": ["x"]} | body).json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    end = scored.token_ids("", "")[
        -len(scored.tokenizer("<|end|><|assistant|>\n<think>\n\n</think>\n\n")["input_ids"]) :
    ]
    for most, wanted in ((CONTEXT_TOKENS, -1), (120, 120)):
        whole = scored.token_ids(QUERY, long)
        expected = sigmoid([scored.logit(whole[: most - len(end)] + end)])
        found = scores_of(server, text_1=QUERY, text_2=[long], truncate_prompt_tokens=wanted)
        assert found == pytest.approx(expected, abs=1e-4)
    short = server.post("/rerank", {"query": long, "texts": [long], "truncate": True})
    assert short.status_code == 200, short.text


def test_only_so_many_tokens_of_a_document_are_read(scored: Scored, server: EngineServer) -> None:
    long = "the lazy dog " * 400
    beginning = scored.tokenizer.decode(scored.tokenizer(long, add_special_tokens=False)["input_ids"][:30])
    answer = server.post("/v2/rerank", {"query": QUERY, "documents": [long], "max_tokens_per_doc": 30}).json()
    same = server.post("/v2/rerank", {"query": QUERY, "documents": [beginning]}).json()
    assert answer["usage"] == same["usage"]
    assert answer["results"][0]["relevance_score"] == pytest.approx(same["results"][0]["relevance_score"], abs=1e-5)


@pytest.mark.parametrize(
    ("path", "changes", "param"),
    [
        ("/v1/rerank", {"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ("/v1/rerank", {"truncate_prompt_tokens": 99, "truncation_side": "left"}, "truncation_side"),
        ("/rerank", {"truncate": True, "truncation_direction": "Left"}, "truncation_direction"),
    ],
)
def test_what_cannot_be_cut_so_is_refused_by_name(
    server: EngineServer, path: str, changes: dict[str, Any], param: str
) -> None:
    texts = {"texts" if path == "/rerank" else "documents": ["x"]}
    answer = server.post(path, {"query": QUERY} | texts | changes)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
