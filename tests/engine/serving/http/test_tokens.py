"""Tests /tokenize and /detokenize against transformers' tokenizer."""

from pathlib import Path
from typing import Any

import pytest
from tests.engine.processes import EngineServer, error_of
from transformers import AutoTokenizer

TEXTS = ("Hello world", "", " two  spaces\n", "naïve 😀 数", "a" * 200)
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "Hello?"}]},
]


@pytest.fixture(scope="module")
def theirs(chat_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(chat_model)


def post(server: EngineServer, path: str, **body: Any) -> Any:
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("special", [True, False])
def test_a_text_has_the_tokens_of_transformers_and_they_have_the_text(
    server: EngineServer, theirs: Any, text: str, special: bool
) -> None:
    answer = post(server, "/tokenize", prompt=text, add_special_tokens=special, return_token_strs=True)
    ids = theirs.encode(text, add_special_tokens=special)
    assert answer["tokens"] == ids
    assert answer["token_strs"] == theirs.convert_ids_to_tokens(ids)
    assert answer["count"] == len(ids)
    assert post(server, "/detokenize", tokens=ids) == {"prompt": theirs.decode(ids)}


def test_a_conversation_has_the_tokens_of_its_prompt(server: EngineServer) -> None:
    answer = post(server, "/tokenize", messages=MESSAGES)
    chat = server.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1, "return_token_ids": True}).json()
    assert answer["tokens"] == chat["prompt_token_ids"]
    assert answer["count"] == chat["usage"]["prompt_tokens"] < answer["max_model_len"]
    assert answer["token_strs"] is None
    begun = post(server, "/tokenize", messages=MESSAGES, add_generation_prompt=False)["tokens"]
    assert answer["tokens"][: len(begun)] == begun != answer["tokens"]


def test_texts_have_the_tokens_of_text_embeddings_inference(server: EngineServer, theirs: Any) -> None:
    """Each token has the positions of its bytes in the text. test_embeddings.py tests special tokens."""
    texts = ["Hello<|end|> world", "naïve 🙂 café"]
    answer = post(server, "/tokenize", inputs=texts)
    for text, tokens in zip(texts, answer, strict=True):
        assert [token["id"] for token in tokens] == theirs.encode(text)
        for token in tokens:
            shown = text.encode()[token["start"] : token["stop"]].decode()
            assert (token["text"], token["special"], bool(shown)) == (shown, False, True)
    assert " 🙂" in {token["text"] for token in answer[1]}
    assert post(server, "/tokenize", inputs="a") == [[{"id": theirs.encode("a")[0], "text": "a", "special": False,
                                                        "start": 0, "stop": 1}]]  # fmt: skip
    ids = theirs.encode("Hello<|end|>")
    assert post(server, "/decode", ids=ids) == ["Hello"]
    assert post(server, "/decode", ids=[ids, ids], skip_special_tokens=False) == ["Hello<|end|>"] * 2


def test_an_answer_of_many_tokens_is_refused(server: EngineServer) -> None:
    error = server.post("/tokenize", {"inputs": ["a b c d " * 900] * 30}).json()["error"]
    assert (error["param"], "65536" in error["message"]) == ("inputs", True)
    assert error_of(server.post("/decode", {"ids": [[5] * 1000] * 70}))["param"] == "ids"


def test_the_tokenizer_is_described_as_its_files_have_it(server: EngineServer, theirs: Any) -> None:
    info = server.get("/tokenizer_info").json()
    assert info["chat_template"] == theirs.chat_template
    assert (info["eos_token"], info["pad_token"]) == (theirs.eos_token, theirs.pad_token)
    assert info["tokenizer_class"]
    assert not [name for name in info if name.endswith("_file")]


def test_a_model_that_generates_is_described_elsewhere(server: EngineServer) -> None:
    answer = server.get("/info")
    assert answer.status_code == 400
    assert "/v1/models" in answer.json()["error"]


REFUSED: tuple[tuple[str, dict[str, Any], str, str], ...] = (
    ("/tokenize", {}, "invalid_value", "prompt"),
    ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "invalid_value", "prompt"),
    ("/tokenize", {"prompt": 5}, "invalid_value", "prompt"),
    ("/tokenize", {"messages": []}, "invalid_value", "messages"),
    ("/tokenize", {"messages": MESSAGES, "tools": [{"type": 5}]}, "unsupported_value", "tools[0]"),
    (
        "/tokenize",
        {"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "a"}}] * 2},
        "invalid_value",
        "tools",
    ),
    ("/tokenize", {"prompt": "a b " * 100_000}, "context_length_exceeded", "prompt"),
    ("/tokenize", {"prompt": "a", "model": "other"}, "model_not_found", "model"),
    ("/tokenize", {"prompt": "a", "inputs": "a"}, "invalid_value", "prompt"),
    ("/tokenize", {"inputs": []}, "invalid_value", "inputs"),
    ("/tokenize", {"inputs": ["a", "a b " * 100_000]}, "context_length_exceeded", "inputs[1]"),
    ("/decode", {"ids": ["a"]}, "invalid_value", "ids"),
    ("/decode", {"ids": [2**30]}, "invalid_value", "ids"),
    ("/detokenize", {}, "invalid_value", "tokens"),
    ("/detokenize", {"tokens": [-1]}, "invalid_value", "tokens[0]"),
    ("/detokenize", {"tokens": [2**30]}, "invalid_value", "tokens"),
    ("/detokenize", {"tokens": ["a"]}, "invalid_value", "tokens[0]"),
)


@pytest.mark.parametrize(("path", "body", "code", "param"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_has_no_tokens_is_refused_by_name(
    server: EngineServer, path: str, body: dict[str, Any], code: str, param: str
) -> None:
    error = error_of(server.post(path, body))
    assert (error["code"], error["param"]) == (code, param), error


def test_no_tokens_have_no_text_and_nothing_is_held(server: EngineServer) -> None:
    assert post(server, "/detokenize", tokens=[]) == {"prompt": ""}
    load = server.get("/load").json()
    assert (load["running"], load["waiting"], load["server_load"]) == (0, 0, 0)
