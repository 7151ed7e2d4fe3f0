"""Tests /embed_sparse, /embed_all and /pooling on a real server with bge-m3's heads: TEI's and vLLM's shapes."""

import base64
import json
import re
import subprocess
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.encoders import SIZE
from tests.engine.processes import EngineServer, error_of
from tests.engine.token_models import TOKEN_SIZE, late_vectors, write_m3
from tokenizers import Tokenizer

from e2e.cluster.paths import REPOSITORY

TEXTS = ["the fox", "a long day"]


class Served:
    def __init__(self, folder: Path) -> None:
        self.model, self.sparse, self.tokens = write_m3(folder / "tiny")
        self.tokenizer = Tokenizer.from_file(str(folder / "tiny" / "tokenizer.json"))
        self.server = EngineServer(folder / "server", folder / "tiny", max_num_seqs=4)

    def ids(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer.encode(text).ids
        return found

    def hidden(self, text: str) -> torch.Tensor:
        with torch.inference_mode():
            states: torch.Tensor = self.model(input_ids=torch.tensor([self.ids(text)])).last_hidden_state[0]
        return states

    def post(self, path: str, **body: Any) -> Any:
        response = self.server.post(path, body)
        assert response.status_code == 200, response.text
        return response.json()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    one = Served(tmp_path_factory.mktemp("outputs"))
    with one.server as server:
        server.wait_ready()
        yield one


def close(vectors: Any, expected: torch.Tensor) -> bool:
    found = torch.tensor(vectors)
    return found.shape == expected.shape and float((found - expected).abs().max()) < 1e-4


def test_sparse_vectors_have_tei_s_shape(served: Served) -> None:
    answer = served.post("/embed_sparse", inputs=TEXTS, truncate=True)
    assert served.post("/embed_sparse", inputs=TEXTS[0]) == answer[:1]
    for text, found in zip(TEXTS, answer, strict=True):
        weights = served.sparse(served.hidden(text)).relu()[:, 0].tolist()
        expected: dict[int, float] = {}
        for token, weight in zip(served.ids(text)[:-1], weights, strict=False):
            expected[token] = max(weight, expected.get(token, 0.0))
        expected = {token: weight for token, weight in sorted(expected.items()) if weight}
        assert [list(each) for each in found] == [["index", "value"]] * len(expected)
        assert [each["index"] for each in found] == list(expected)
        assert [each["value"] for each in found] == pytest.approx(list(expected.values()), abs=1e-4)


def test_embed_all_returns_the_hidden_states_of_all_tokens(served: Served) -> None:
    answer = served.post("/embed_all", inputs=TEXTS)
    assert all(close(found, served.hidden(text)) for found, text in zip(answer, TEXTS, strict=True))
    assert served.post("/embed_all", inputs=served.ids(TEXTS[0])) == answer[:1]


def test_pooling_answers_vllm_s_tasks(served: Served) -> None:
    many = served.post("/pooling", input=TEXTS, task="token_embed")
    assert {"id", "object", "created", "model", "data", "usage"} == set(many)
    assert many["usage"]["prompt_tokens"] == sum(len(served.ids(text)) for text in TEXTS)
    for index, text in enumerate(TEXTS):
        one = many["data"][index]
        assert (one["index"], one["object"]) == (index, "pooling")
        assert close(one["data"], late_vectors(served.model, served.tokens, served.ids(text))[1:])
    raw = served.post("/pooling", input=TEXTS[0], task="token_embed", use_activation=False)["data"][0]["data"]
    assert close(raw, served.tokens(served.hidden(TEXTS[0]))[1:])
    weights = served.post("/pooling", input=TEXTS[0], task="token_classify")["data"][0]["data"]
    assert close(weights, served.sparse(served.hidden(TEXTS[0])).relu()[:-1, 0])
    (whole,) = served.post("/pooling", input=TEXTS[0])["data"]  # by default a vector of the whole text
    assert whole["data"] == served.post("/v1/embeddings", input=TEXTS[0])["data"][0]["embedding"]


def test_no_byte_of_a_whole_vector_is_taken_for_a_mark(served: Served) -> None:
    inputs = [[first, second] for first in range(3, 43) for second in range(3, 28)]
    vectors = [each["embedding"] for each in served.post("/v1/embeddings", input=inputs)["data"]]
    assert any(array("f", vector).tobytes()[:1] == b"\1" for vector in vectors)
    pooled = served.post("/pooling", input=inputs, task="embed", encoding_format="base64")["data"]
    assert [array("f", base64.b64decode(each["data"])).tolist() for each in pooled] == vectors


def test_vectors_of_tokens_may_be_bytes_or_base64(served: Served) -> None:
    numbers = served.post("/pooling", input=TEXTS, task="token_embed")["data"]
    texts = served.post("/pooling", input=TEXTS, task="token_embed", encoding_format="base64")["data"]
    for number, text in zip(numbers, texts, strict=True):
        flat = array("f", base64.b64decode(text["data"])).tolist()
        assert flat == [value for vector in number["data"] for value in vector]
    body = {"input": TEXTS, "task": "token_embed", "encoding_format": "bytes", "embed_dtype": "float16"}
    response = served.server.post("/pooling", body)
    places = json.loads(response.headers["metadata"])["data"]
    assert [place["shape"] for place in places] == [[len(served.ids(text)) - 1, TOKEN_SIZE] for text in TEXTS]
    assert places[-1]["end"] == len(response.content) == 2 * TOKEN_SIZE * sum(p["shape"][0] for p in places)


@pytest.mark.parametrize("path", ["/embed_sparse", "/embed_all"])
@pytest.mark.parametrize(
    "inputs", [None, 7, {}, "", [], [""], ["a", 7], [[1.5]], [["a"]], [{"text": "a"}], [[-1]], [[10**9]], [[[1]]], True]
)
def test_inputs_of_wrong_types_are_refused_in_tei_s_format(served: Served, path: str, inputs: Any) -> None:
    response = served.server.post(path, {"inputs": inputs})
    assert response.status_code == 400, response.text
    assert set(response.json()) == {"error", "error_type", "code", "param"}
    assert response.json()["error_type"] == "Validation"


@pytest.mark.parametrize("path", ["/embed_sparse", "/embed_all"])
def test_too_many_inputs_are_refused_at_once(served: Served, path: str) -> None:
    response = served.server.post(path, {"inputs": ["a"] * 100_000})
    assert response.status_code == 400
    assert "100000" in response.text
    assert served.post("/embed", inputs="the fox")


def test_answers_that_are_too_large_are_refused_before_they_are_computed(served: Served) -> None:
    texts = ["a b c d e f g h " * 50] * 2000
    response = served.server.post("/embed_all", {"inputs": texts, "truncate": True})
    assert response.status_code == 400
    assert f"{(64 << 20) // (4 * SIZE)} that one answer may have" in response.text


@pytest.mark.parametrize(
    "body",
    [
        {"task": "classify"}, {"task": "plugin", "data": {}}, {"task": 1}, {"task": "token_embed", "dimensions": 5},
        {"prompt_name": "query", "task": "token_embed"}, {"encoding_format": "hex"}, {"normalize": "x"} | {"input": ""},
    ],
)  # fmt: skip
def test_pooling_refuses_what_it_has_not_in_openai_s_format(served: Served, body: dict[str, Any]) -> None:
    response = served.server.post("/pooling", {"input": "a"} | body)
    assert response.status_code == 400, response.text
    assert error_of(response)["message"]


def test_the_page_s_commands_are_answered(served: Served) -> None:
    commands = re.findall(r"```sh\n(.*?)```", (REPOSITORY / "docs/token-embeddings.md").read_text(), re.DOTALL)
    commands = [command for command in commands if "/rerank" not in command]  # of a ColBERT model
    assert len(commands) == 2
    for command in commands:
        command = re.sub(r"http://127\.0\.0\.1:8080/default/\w+", served.server.url, command)
        command = command.replace(
            '"model": "colbert"', f'"model": "{served.server.get("/v1/models").json()["data"][0]["id"]}"'
        )
        answer = json.loads(subprocess.run(command, shell=True, check=True, capture_output=True).stdout)
        assert isinstance(answer, list) or answer["data"]
