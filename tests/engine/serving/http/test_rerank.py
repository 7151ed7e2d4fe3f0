"""Tests /v1/rerank, /v2/rerank, /rerank, /v1/score and /score on a real server against transformers' scores."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonschema import Draft202012Validator
from tests.engine.classifiers import open_tokenizer, write_served_classifier
from tests.engine.processes import EngineServer, error_of
from tests.engine.receipts import ASKED, check_receipt, check_sum
from tests.engine.serving.http.other_tasks import list_paths

from conveyor_api.endpoints import ENDPOINTS
from conveyor_protocol.request_headers import USAGE_HEADER

CONTEXT_TOKENS = 512
QUERY = "the quick fox"
DOCUMENTS = ["the fox", "naïve café", "x", "the quick brown fox jumps over the lazy dog", "the fox", ""]
PATHS = [endpoint.path for endpoint in ENDPOINTS if "ranks" in endpoint.models]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/rerank": {"query": QUERY, "documents": DOCUMENTS},
    "/v2/rerank": {"query": QUERY, "documents": DOCUMENTS},
    "/v1/score": {"text_1": QUERY, "text_2": DOCUMENTS},
    "/score": {"text_1": QUERY, "text_2": DOCUMENTS},
    "/rerank": {"query": QUERY, "texts": DOCUMENTS},
}


class Served:
    """A server with a tiny cross-encoder, and transformers' scores."""

    def __init__(self, kind: str, folder: Path, **fields: object) -> None:
        self.model = write_served_classifier(kind, folder / "tiny")
        self.tokenizer = open_tokenizer(folder / "tiny")
        self.server = EngineServer(folder / "server", folder / "tiny", **fields)

    def logits(self, pairs: Sequence[tuple[str, str]], **cut: Any) -> list[float]:
        with torch.inference_mode():
            return [
                float(self.model(**self.tokenizer([first], [second], return_tensors="pt", **cut)).logits)
                for first, second in pairs
            ]

    def scores(self, pairs: Sequence[tuple[str, str]], **cut: Any) -> list[float]:
        return torch.tensor(self.logits(pairs, **cut)).sigmoid().tolist()

    def count_tokens(self, pairs: Sequence[tuple[str, str]]) -> int:
        return sum(len(self.tokenizer([first], [second])["input_ids"][0]) for first, second in pairs)


@pytest.fixture(scope="module", params=["bert", pytest.param("qwen3", marks=pytest.mark.slow)])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with dynamic batches of four and a short window."""
    folder = tmp_path_factory.mktemp(request.param)
    one = Served(request.param, folder, batching_mode="dynamic", max_num_seqs=4, batching_window_seconds=0.05)
    with one.server as server:
        server.wait_ready()
        yield one


PAIRS = [(QUERY, document) for document in DOCUMENTS]


def post(served: Served, path: str, **more: Any) -> Any:
    answer = served.server.post(path, BODIES[path] | more)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_model_is_described_as_a_reranker(served: Served) -> None:
    assert list(served.server.get("/info").json()["model_type"]) == ["reranker"]


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank"])
def test_documents_come_best_first_with_the_scores_of_transformers(served: Served, path: str) -> None:
    answer = post(served, path, model="tiny")
    expected = served.scores(PAIRS)
    scores = {result["index"]: result["relevance_score"] for result in answer["results"]}
    assert [scores[index] for index in range(len(DOCUMENTS))] == pytest.approx(expected, abs=1e-4)
    found = [result["relevance_score"] for result in answer["results"]]
    assert found == sorted(found, reverse=True)
    assert max(found) - min(found) > 0.01, "the comparison could fail"
    assert answer["model"] == "tiny"
    assert answer["id"].startswith("rerank-")
    num_tokens = served.count_tokens(PAIRS)
    assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    assert "document" not in answer["results"][0]


def test_only_the_best_come_with_their_documents_if_requested(served: Served) -> None:
    whole = post(served, "/v1/rerank")["results"]
    objects: list[Any] = [{"text": text, "id": "7"} if number % 2 else text for number, text in enumerate(DOCUMENTS)]
    answer = post(served, "/v1/rerank", documents=objects, top_n=2, return_documents=True)["results"]
    assert [result["index"] for result in answer] == [result["index"] for result in whole[:2]]
    assert [result["document"] for result in answer] == [{"text": DOCUMENTS[result["index"]]} for result in answer]
    assert len(post(served, "/v1/rerank", top_n=99)["results"]) == len(DOCUMENTS)
    assert len(post(served, "/v1/rerank", top_n=0)["results"]) == len(DOCUMENTS)


def test_logits_come_if_requested(served: Served) -> None:
    expected = served.logits(PAIRS)
    raw = post(served, "/v1/score", use_activation=False)["data"]
    assert [one["score"] for one in raw] == pytest.approx(expected, abs=1e-4)
    scores = {one["index"]: one["score"] for one in post(served, "/rerank", raw_scores=True)}
    assert [scores[index] for index in range(len(DOCUMENTS))] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("first", "second"),
    [("the fox", "x"), ("the fox", ["x", "lazy"]), (["the fox"], ["x"]), (["a", "b"], ["x", "the lazy dog"])],
    ids=str,
)
def test_pairs_are_scored_one_to_one_or_one_to_many(served: Served, first: Any, second: Any) -> None:
    seconds = [second] if isinstance(second, str) else second
    firsts = [first] if isinstance(first, str) else first
    pairs = list(zip(firsts * (len(seconds) if len(firsts) == 1 else 1), seconds, strict=True))
    for names in (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")):
        answer = served.server.post("/v1/score", dict(zip(names, (first, second), strict=True))).json()
        assert [one["score"] for one in answer["data"]] == pytest.approx(served.scores(pairs), abs=1e-4)
        assert [(one["index"], one["object"]) for one in answer["data"]] == [(n, "score") for n in range(len(pairs))]
        assert answer["usage"]["prompt_tokens"] == served.count_tokens(pairs)
        assert (answer["object"], answer["model"]) == ("list", "tiny")


def test_the_shape_of_text_embeddings_inference_is_a_list(served: Served) -> None:
    ranks = post(served, "/rerank", return_text=True)
    assert [rank["text"] for rank in ranks] == [DOCUMENTS[rank["index"]] for rank in ranks]
    scores = [rank["score"] for rank in ranks]
    assert scores == sorted(scores, reverse=True)
    assert scores == pytest.approx([served.scores(PAIRS)[rank["index"]] for rank in ranks], abs=1e-4)
    assert "text" not in post(served, "/rerank")[0]


def test_a_body_with_documents_is_answered_on_the_same_path_as_vllm_does(served: Served) -> None:
    body = {"query": QUERY, "documents": DOCUMENTS, "top_n": 2}
    there = served.server.post("/v1/rerank", body | {"return_documents": True}).json()
    here = served.server.post("/rerank", body).json()
    assert here.pop("id").startswith("rerank-")
    assert here == {name: value for name, value in there.items() if name != "id"}
    bare = served.server.post("/rerank", body | {"return_documents": False}).json()["results"]
    assert all("document" not in result for result in bare)
    error = served.server.post("/rerank", {"query": QUERY, "documents": []}).json()["error"]
    assert (error["code"], error["param"]) == ("invalid_value", "documents")
    assert served.server.post("/rerank", {"query": QUERY}).json()["error"]["param"] == "texts"


def test_a_pair_that_is_too_long_is_cut_or_refused_as_the_request_says(served: Served) -> None:
    long = ["the lazy dog " * 400, "x"]
    pairs = [(QUERY, document) for document in long]
    refused = served.server.post("/v1/rerank", {"query": QUERY, "documents": long})
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "documents[0]")
    assert served.server.post("/rerank", {"query": QUERY, "texts": long}).json()["error"]["param"] == "texts[0]"
    for most, body in ((CONTEXT_TOKENS, {"truncate_prompt_tokens": -1}), (20, {"truncate_prompt_tokens": 20})):
        answer = post(served, "/v1/score", text_2=long, **body)
        expected = served.scores(pairs, truncation="longest_first", max_length=most)
        assert [one["score"] for one in answer["data"]] == pytest.approx(expected, abs=1e-4)
    ranks = post(served, "/rerank", texts=long, truncate=True)
    expected = served.scores(pairs, truncation="longest_first", max_length=CONTEXT_TOKENS)
    assert {rank["index"]: rank["score"] for rank in ranks} == pytest.approx(dict(enumerate(expected)), abs=1e-4)


def test_only_so_many_tokens_of_a_document_are_read(served: Served) -> None:
    document = "the lazy dog " * 400
    cut = post(served, "/v2/rerank", documents=[document], max_tokens_per_doc=30)
    tokens = served.tokenizer(document, add_special_tokens=False)["input_ids"][:30]
    same = post(served, "/v2/rerank", documents=[served.tokenizer.decode(tokens)])
    assert cut["usage"] == same["usage"]
    assert cut["results"][0]["relevance_score"] == pytest.approx(same["results"][0]["relevance_score"], abs=1e-5)


def test_a_gateway_gets_the_number_of_used_tokens(served: Served) -> None:
    answer = served.server.post("/v1/rerank", BODIES["/v1/rerank"], **{USAGE_HEADER: "ranked"})
    used = {"prompt_tokens": answer.json()["usage"]["prompt_tokens"], "cached_tokens": 0, "completion_tokens": 0}
    assert used.items() <= json.loads(answer.headers[USAGE_HEADER]).items()


def test_documents_of_one_request_share_batches(served: Served) -> None:
    steps = served.server.metric("conveyor_engine_steps_total")
    post(served, "/v1/rerank", documents=["the fox"] * 8)
    assert served.server.metric("conveyor_engine_steps_total") - steps <= 3


REFUSED: tuple[tuple[str, dict[str, Any], str, str | None], ...] = (
    ("/v1/rerank", {"documents": []}, "invalid_value", "documents"),
    ("/v1/rerank", {"documents": None}, "invalid_value", "documents"),
    ("/v1/rerank", {"documents": "x"}, "invalid_value", "documents"),
    ("/v1/rerank", {"documents": ["x", None]}, "invalid_value", "documents"),
    ("/v1/rerank", {"documents": ["x", {"body": "y"}]}, "invalid_value", "documents"),
    ("/v1/rerank", {"documents": ["x"] * 10_000}, "invalid_value", "documents"),
    ("/v1/rerank", {"query": ""}, "invalid_value", "query"),
    ("/v1/rerank", {"query": None}, "invalid_value", "query"),
    ("/v1/rerank", {"query": "fox " * 5000}, "context_length_exceeded", "query"),
    ("/v1/rerank", {"top_n": -1}, "invalid_value", "top_n"),
    ("/v1/rerank", {"max_tokens_per_doc": -1}, "invalid_value", "max_tokens_per_doc"),
    ("/v1/rerank", {"truncate_prompt_tokens": CONTEXT_TOKENS + 1}, "invalid_value", "truncate_prompt_tokens"),
    ("/v1/rerank", {"truncate_prompt_tokens": 2}, "invalid_value", "truncate_prompt_tokens"),
    ("/v1/rerank", {"rank_fields": ["title"]}, "unsupported_value", "rank_fields"),
    ("/v1/rerank", {"instruction": "be kind"}, "unsupported_value", "instruction"),
    ("/v1/rerank", {"priority": 1001}, "invalid_value", "priority"),
    ("/v1/rerank", {"model": "other"}, "model_not_found", "model"),
    ("/v1/score", {"text_2": []}, "invalid_value", "text_2"),
    ("/v1/score", {"text_2": None}, "invalid_value", "text_1"),
    ("/v1/score", {"queries": "x"}, "invalid_value", "text_1"),
    ("/v1/score", {"text_1": ["a", "b"]}, "invalid_value", "text_2"),
    ("/v1/score", {"text_1": ["a"] * 9000, "text_2": ["a"] * 9000}, "invalid_value", "text_2"),
    ("/rerank", {"texts": []}, "invalid_value", "texts"),
    ("/rerank", {"texts": None}, "invalid_value", "texts"),
    ("/rerank", {"texts": ["a"] * 9000}, "invalid_value", "texts"),
    ("/rerank", {"texts": [{"text": "a"}]}, "invalid_value", "texts[0]"),
    ("/rerank", {"truncation_direction": "up"}, "invalid_value", "truncation_direction"),
)


@pytest.mark.parametrize(("path", "changes", "code", "param"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_cannot_be_scored_is_refused_by_name(
    served: Served, path: str, changes: dict[str, Any], code: str, param: str
) -> None:
    answer = served.server.post(path, BODIES[path] | changes)
    error = answer.json()["error"]
    refusal = (answer.status_code, error["code"], error["param"])
    assert refusal == (404 if code == "model_not_found" else 400, code, param), error["message"]
    assert len(answer.content) < 1000


def test_text_that_is_no_unicode_is_replaced(served: Served) -> None:
    answer = served.server.post("/v1/rerank", b'{"query": "a", "documents": ["\\ud800"]}')
    assert answer.status_code == 200


@pytest.mark.parametrize("path", PATHS)
def test_answers_and_errors_are_as_the_document_says(served: Served, path: str) -> None:
    document = served.server.get("/openapi.json").json()
    post_of = document["paths"][path]["post"]
    for more, status in (({}, 200), ({"model": "other"}, 404), ({"model": 7}, 400)):
        answer = served.server.post(path, BODIES[path] | more)
        assert answer.status_code == status
        schema = post_of["responses"][str(status)]["content"]["application/json"]["schema"]
        Draft202012Validator(schema | {"components": document["components"]}).validate(answer.json())


@pytest.mark.parametrize("path", list_paths("ranks"))
def test_an_engine_that_ranks_does_nothing_else(served: Served, path: str) -> None:
    answer = served.server.post(path, {"prompt": "a"})
    assert (answer.status_code, error_of(answer)["code"]) == (400, "wrong_task")
    assert error_of(answer)["message"].endswith(
        "it answers /v1/rerank, /v2/rerank, /v1/score, /score, /rerank, /tokenize, /detokenize and /decode"
    )


@pytest.mark.parametrize("path", PATHS)
def test_an_engine_that_generates_ranks_nothing(server: EngineServer, path: str) -> None:
    answer = server.post(path, BODIES[path])
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "wrong_task")
    assert "ranks no documents" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/rerank", "/v1/score", "/rerank"])
def test_an_answer_has_its_receipt(served: Served, path: str) -> None:
    answer = served.server.post(path, BODIES[path], **ASKED)
    if isinstance(answer.json(), list):
        check_receipt(json.loads(answer.headers["x-receipt"]))
    else:
        check_receipt(answer.json()["usage"]["receipt"])


def test_the_receipts_of_requests_are_the_time_of_all_steps(served: Served) -> None:
    def run(_: int, headers: Mapping[str, str]) -> None:
        answer = served.server.post("/v1/rerank", BODIES["/v1/rerank"], **headers)
        assert answer.status_code == 200, answer.text

    check_sum(served.server, 4, run)
