"""Tests /embed in text-embeddings-inference's format, and instructions before texts, on a real server."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.encoders import SIZE, embed, write_served_encoder
from tests.engine.processes import EngineServer, error_of
from tokenizers import Tokenizer

MODE = "pooling_mode_mean_tokens"
PROMPTS = {"query": "find: ", "document": "", "topic": "the topic is "}
TEXTS = ["the fox", "a long day"]


class Served:
    """A served model with instructions in its files. `expect` returns transformers' vectors."""

    def __init__(self, folder: Path) -> None:
        directory = folder / "tiny"
        self._model = write_served_encoder("bert", directory, matryoshka_dimensions=[8])
        settings = {"prompts": PROMPTS, "default_prompt_name": "topic"}
        (directory / "config_sentence_transformers.json").write_text(json.dumps(settings))
        self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self.server = EngineServer(folder / "server", directory, max_num_seqs=4)

    def ids(self, text: str) -> list[int]:
        found: list[int] = self._tokenizer.encode(text).ids
        return found

    def expect(self, text: str | list[int], *, normalizes: bool = True, dimensions: int | None = None) -> torch.Tensor:
        ids = self.ids(text) if isinstance(text, str) else text
        return embed(self._model, ids, MODE, normalizes=normalizes, dimensions=dimensions)

    def post(self, path: str, **body: Any) -> Any:
        response = self.server.post(path, body)
        assert response.status_code == 200, response.text
        return response.json()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    one = Served(tmp_path_factory.mktemp("embed"))
    with one.server as server:
        server.wait_ready()
        yield one


def check(vectors: list[list[float]], expected: list[torch.Tensor]) -> None:
    assert len(vectors) == len(expected)
    for vector, values in zip(vectors, expected, strict=True):
        assert len(vector) == len(values)
        assert float((torch.tensor(vector) - values).abs().max()) < 1e-4


def test_an_instruction_begins_each_text(served: Served) -> None:
    answer = served.post("/embed", inputs=TEXTS, prompt_name="query")
    check(answer, [served.expect("find: " + text) for text in TEXTS])
    answer = served.post("/v1/embeddings", input=TEXTS, prompt_name="document")
    check([each["embedding"] for each in answer["data"]], [served.expect(text) for text in TEXTS])


def test_without_a_name_it_is_the_model_s_own_and_token_ids_have_none(served: Served) -> None:
    check(served.post("/embed", inputs="the fox"), [served.expect("the topic is the fox")])
    ids = served.ids("the fox")
    check(served.post("/embed", inputs=ids), [served.expect(ids)])
    (one,) = served.post("/v1/embeddings", input="the fox")["data"]
    check([one["embedding"]], [served.expect("the topic is the fox")])


def test_vectors_have_length_one_unless_they_are_to_be_as_they_are(served: Served) -> None:
    body = {"inputs": TEXTS, "prompt_name": "document"}
    check(served.post("/embed", **body, normalize=False), [served.expect(text, normalizes=False) for text in TEXTS])
    check(served.post("/embed", **body, dimensions=8), [served.expect(text, dimensions=8) for text in TEXTS])
    assert len(served.post("/embed", inputs="a")[0]) == SIZE


def test_a_longer_text_is_refused_or_cut_if_requested(served: Served) -> None:
    long = "the fox " * 600
    assert error_of(served.server.post("/embed", {"inputs": long}))["code"] == "context_length_exceeded"
    (right,) = served.post("/embed", inputs=long, truncate=True, prompt_name="document")
    check([right], [served.expect([*served.ids(long)[:511], served.ids(long)[-1]])])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"inputs": []}, "inputs"),
        ({"inputs": ["a", ""]}, "inputs"),
        ({"inputs": "a", "prompt_name": "other"}, "prompt_name"),
        ({"inputs": "a", "normalize": "yes"}, "normalize"),
        ({"inputs": "a", "dimensions": 9}, "dimensions"),
    ],
    ids=str,
)
def test_what_cannot_be_embedded_is_refused_by_name(served: Served, body: dict[str, Any], param: str) -> None:
    answer = served.server.post("/embed", body)
    error = error_of(answer)
    assert (error["code"], error["param"]) == ("invalid_value", param)
    assert answer.json()["error_type"] == "Validation", "the form of text-embeddings-inference"


def test_the_model_and_its_limits_are_described(served: Served) -> None:
    info = served.server.get("/info").json()
    assert info["model_type"] == {"embedding": {"pooling": "mean"}}
    assert {"sha", "docker_label"} <= info.keys(), "tei-client requires them"
    name = served.server.get("/v1/models").json()["data"][0]["id"]
    assert (info["model_id"], info["served_model_name"], info["model_dtype"]) == (name, name, "float32")
    served.post("/embed", inputs=["a "] * info["max_client_batch_size"])
    beyond = served.server.post("/embed", {"inputs": ["a "] * (info["max_client_batch_size"] + 1)})
    assert (beyond.status_code, beyond.json()["error_type"]) == (400, "Validation")
    long = {"inputs": [[7] * (info["max_input_length"] + 1)], "truncate": info["auto_truncate"]}
    assert served.server.post("/embed", long).status_code == 400
