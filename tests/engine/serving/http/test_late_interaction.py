"""Tests /score and /rerank with a ColBERT model, and the limit of sparse vectors, on real servers."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engine.processes import EngineServer
from tests.engine.token_models import score_by_hand, write_colbert, write_splade

from e2e.cluster.paths import REPOSITORY

QUERY = "the quick fox"
DOCUMENTS = ["the fox", "naïve café", "x", "the quick brown fox jumps over the lazy dog", "the fox", ""]


class Served:
    def __init__(self, folder: Path) -> None:
        self.directory = folder / "tiny"
        self.model, self.linear = write_colbert("bert", self.directory, "native")
        self.server = EngineServer(folder / "server", self.directory, max_num_seqs=4)

    def post(self, path: str, **body: Any) -> Any:
        response = self.server.post(path, body)
        assert response.status_code == 200, response.text
        return response.json()

    def score(self, query: str, document: str) -> float:
        return score_by_hand(self.model, self.linear, self.directory, (query, document), "native")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    one = Served(tmp_path_factory.mktemp("late"))
    with one.server as server:
        server.wait_ready()
        yield one


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_scores_are_sums_of_the_largest_products(served: Served, path: str) -> None:
    answer = served.post(path, text_1=QUERY, text_2=DOCUMENTS)
    expected = [served.score(QUERY, each) for each in DOCUMENTS]
    assert [each["score"] for each in answer["data"]] == pytest.approx(expected, abs=1e-4)
    assert answer["usage"]["prompt_tokens"] > 24 * len(DOCUMENTS), "a query for each document, as in vLLM"
    pairs = served.post(path, queries=DOCUMENTS[:2], documents=DOCUMENTS[2:4])["data"]
    expected = [served.score(*each) for each in zip(DOCUMENTS[:2], DOCUMENTS[2:4], strict=True)]
    assert [each["score"] for each in pairs] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_ranked_by_these_scores(served: Served, path: str) -> None:
    expected = [served.score(QUERY, each) for each in DOCUMENTS]
    best = sorted(range(len(DOCUMENTS)), key=expected.__getitem__, reverse=True)
    results = served.post(path, query=QUERY, documents=DOCUMENTS, top_n=4)["results"]
    assert [each["relevance_score"] for each in results] == pytest.approx([expected[i] for i in best[:4]], abs=1e-4)
    assert results[0]["index"] == best[0]
    ranks = served.post("/rerank", query=QUERY, texts=DOCUMENTS)
    assert [each["score"] for each in ranks] == pytest.approx([expected[i] for i in best], abs=1e-4)


def test_the_page_s_command_is_answered(served: Served) -> None:
    page = (REPOSITORY / "docs/token-embeddings.md").read_text()
    (command,) = (each for each in re.findall(r"```sh\n(.*?)```", page, re.DOTALL) if "/rerank" in each)
    command = re.sub(r"http://127\.0\.0\.1:8080/default/\w+", served.server.url, command)
    name = served.server.get("/v1/models").json()["data"][0]["id"]
    command = command.replace('"colbert"', f'"{name}"')
    answer = json.loads(subprocess.run(command, shell=True, check=True, capture_output=True).stdout)
    assert {each["index"] for each in answer["results"]} == {0, 1}


def test_vectors_of_whole_texts_are_still_refused(served: Served) -> None:
    response = served.server.post("/v1/embeddings", {"input": "a"})
    assert response.status_code == 400
    assert "vectors of tokens (/pooling with task token_embed)" in response.text


def test_a_sparse_vector_with_too_many_numbers_is_refused(tmp_path: Path) -> None:
    """A model for masked tokens that was not trained for sparse vectors may have a weight for each token."""
    model = write_splade("bert", tmp_path / "tiny", named=False, vocab_size=66_000)
    model.get_output_embeddings().bias.data += 9
    model.save_pretrained(tmp_path / "tiny")
    with EngineServer(tmp_path / "server", tmp_path / "tiny", max_num_seqs=4) as server:
        server.wait_ready()
        response = server.post("/embed_sparse", {"inputs": ["a", "the fox"]})
        assert response.status_code == 400
        assert "inputs" in response.json()["param"]
        assert "more than 65536 numbers that are not zero" in response.text
        assert server.post("/embed", {"inputs": ["a", "the fox"]}).status_code == 200
