"""Tests /v1/embeddings on real servers, with OpenAI's client if it supports the request."""

import base64
import json
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from openai import BadRequestError, OpenAI
from tests.engine.encoders import FILES, SIZE, embed
from tests.engine.processes import EngineServer, error_of, wait_until
from tests.engine.receipts import ASKED, check_receipt
from tests.engine.serving.http.embedding_server import Served, distance

from conveyor_api.endpoints import ENDPOINTS
from conveyor_protocol.request_headers import USAGE_HEADER

CONTEXT_TOKENS = 512
TEXTS = ["the fox", "naïve café", "x", "the quick brown fox jumps over the lazy dog", "the fox"]


@pytest.fixture(scope="module", params=["bert", pytest.param("qwen3", marks=pytest.mark.slow)])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with dynamic batches of four and a short window."""
    folder = tmp_path_factory.mktemp(request.param)
    one = Served(request.param, folder, batching_mode="dynamic", max_num_seqs=4, batching_window_seconds=0.05)
    with one.server as server:
        server.wait_ready()
        yield one


@pytest.fixture
def client(served: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=served.server.url + "/v1", api_key="none", max_retries=0) as opened:
        yield opened


def test_texts_become_the_vectors_of_transformers(served: Served, client: OpenAI) -> None:
    answer = client.embeddings.create(model="tiny", input=TEXTS)  # which asks for base64, and decodes it
    expected = [served.expect(served.token_ids(text)) for text in TEXTS]
    assert [one.index for one in answer.data] == list(range(len(TEXTS)))
    assert max(distance(one.embedding, vector) for one, vector in zip(answer.data, expected, strict=True)) < 1e-4
    num_tokens = sum(len(served.token_ids(text)) for text in TEXTS)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (num_tokens, num_tokens)
    assert (answer.object, answer.model, answer.data[0].object) == ("list", "tiny", "embedding")


def test_a_gateway_gets_the_number_of_used_tokens(served: Served) -> None:
    answer = served.server.post("/v1/embeddings", {"input": TEXTS}, **{USAGE_HEADER: "embedded"})
    used = json.loads(answer.headers[USAGE_HEADER])
    assert used.pop("receipt")[0] > 0
    assert used == {
        "prompt_tokens": answer.json()["usage"]["prompt_tokens"],
        "cached_tokens": 0,
        "completion_tokens": 0,
    }


def test_an_answer_has_its_receipt_in_its_usage_or_in_a_header(served: Served) -> None:
    answer = served.server.post("/v1/embeddings", {"input": TEXTS}, **ASKED)
    receipt = check_receipt(answer.json()["usage"]["receipt"])
    assert receipt["closed_by"] in ("full", "window")
    assert "x-receipt" not in answer.headers
    for body in ({"input": TEXTS, "encoding_format": "bytes_only"}, {"input": TEXTS, "encoding_format": "bytes"}):
        answer = served.server.post("/v1/embeddings", body, **ASKED)
        header = answer.headers.get("x-receipt")
        check_receipt(json.loads(header) if header else json.loads(answer.headers["metadata"])["usage"]["receipt"])
    answer = served.server.post("/embed", {"inputs": TEXTS}, **ASKED)
    check_receipt(json.loads(answer.headers["x-receipt"]))
    assert isinstance(answer.json(), list)


def test_the_tokenizer_s_own_tokens_are_around_a_text(served: Served, client: OpenAI) -> None:
    end = served.tokenizer.token_to_id("<|end|>")
    assert served.token_ids("a")[-1] == end
    num_tokens = client.embeddings.create(model="tiny", input="a").usage.prompt_tokens
    assert num_tokens == len(served.token_ids("a")) == (3 if served.kind == "bert" else 2)


def test_every_form_of_input_gives_the_same(served: Served, client: OpenAI) -> None:
    ids = served.token_ids("the fox")
    forms: list[Any] = ["the fox", ["the fox"], ids, [ids]]
    vectors = [client.embeddings.create(model="tiny", input=form).data[0].embedding for form in forms]
    assert all(distance(vector, torch.tensor(vectors[0])) < 1e-6 for vector in vectors)


def test_floats_and_base64_are_the_same_numbers(served: Served) -> None:
    body = {"input": "the fox"}
    floats = served.server.post("/v1/embeddings", body | {"encoding_format": "float"}).json()["data"][0]["embedding"]
    packed = served.server.post("/v1/embeddings", body | {"encoding_format": "base64"}).json()["data"][0]["embedding"]
    assert list(struct.unpack(f"<{SIZE}f", base64.b64decode(packed))) == pytest.approx(floats, abs=1e-6)


DTYPES = {
    "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2,
}  # fmt: skip


@pytest.mark.parametrize("endianness", ["native", "little", "big"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_have_the_requested_type_and_order(served: Served, dtype: str, endianness: str) -> None:
    """The format is what vLLM's binary2tensor reads."""
    body = {"input": ["the fox", "x"], "embed_dtype": dtype, "endianness": endianness}
    floats = served.server.post("/v1/embeddings", body).json()["data"]
    expected = [torch.tensor(one["embedding"]).to(DTYPES[dtype]).float() for one in floats]

    def read(packed: bytes) -> torch.Tensor:
        size = DTYPES[dtype].itemsize
        kind = {1: np.uint8, 2: np.int16, 4: np.int32}[size]
        numbers = np.frombuffer(packed, np.dtype(kind).newbyteorder(">" if endianness == "big" else "<"))
        return torch.from_numpy(numbers.astype(kind)).view(DTYPES[dtype]).float()

    packed = served.server.post("/v1/embeddings", body | {"encoding_format": "base64"}).json()["data"]
    whole = served.server.post("/v1/embeddings", body | {"encoding_format": "bytes"})
    bare = served.server.post("/v1/embeddings", body | {"encoding_format": "bytes_only"})
    metadata = json.loads(whole.headers["metadata"])
    assert whole.headers["content-type"] == bare.headers["content-type"] == "application/octet-stream"
    assert "metadata" not in bare.headers
    assert bare.content == whole.content
    assert metadata["usage"]["prompt_tokens"] == sum(len(served.token_ids(text)) for text in body["input"])
    for number, (vector, place) in enumerate(zip(expected, metadata["data"], strict=True)):
        assert (place["index"], place["embed_dtype"], place["endianness"]) == (number, dtype, endianness)
        assert place["shape"] == [SIZE]
        assert torch.equal(read(whole.content[place["start"] : place["end"]]), vector)
        assert torch.equal(read(base64.b64decode(packed[number]["embedding"])), vector)


def test_a_header_has_room_for_some_inputs_only(served: Served) -> None:
    body = {"input": ["x"] * 49, "encoding_format": "bytes"}
    error = served.server.post("/v1/embeddings", body).json()["error"]
    assert (error["param"], error["code"]) == ("encoding_format", "invalid_value")
    assert "bytes_only" in error["message"]
    assert served.server.post("/v1/embeddings", body | {"input": ["x"] * 48}).status_code == 200
    answer = served.server.post("/v1/embeddings", body | {"encoding_format": "bytes_only"})
    assert len(answer.content) == 49 * 4 * SIZE


MESSAGES = [{"role": "user", "content": "the fox"}, {"role": "assistant", "content": "a dog"}]
RENDERED = "<|user|>the fox<|end|><|assistant|>a dog<|end|>"


@pytest.mark.parametrize(
    ("fields", "text", "special"),
    [
        ({}, RENDERED, False),
        ({"add_special_tokens": True}, RENDERED, True),
        ({"add_generation_prompt": True}, RENDERED + "<|assistant|>", False),
        ({"continue_final_message": True}, RENDERED.removesuffix("<|end|>"), False),
    ],
)
def test_a_conversation_is_the_text_of_its_template(
    served: Served, fields: dict[str, Any], text: str, special: bool
) -> None:
    answer = served.server.post("/v1/embeddings", {"messages": MESSAGES, **fields}).json()
    ids = served.tokenizer.encode(text, add_special_tokens=special).ids
    assert answer["usage"]["prompt_tokens"] == len(ids)
    assert distance(answer["data"][0]["embedding"], served.expect(ids)) < 1e-4


def test_a_text_is_read_without_special_tokens_if_requested(served: Served) -> None:
    answer = served.server.post("/v1/embeddings", {"input": "the fox", "add_special_tokens": False}).json()
    ids = served.tokenizer.encode("the fox", add_special_tokens=False).ids
    assert distance(answer["data"][0]["embedding"], served.expect(ids)) < 1e-4


def test_the_tokens_around_a_text_are_marked_as_special(served: Served) -> None:
    """The format is text-embeddings-inference's."""
    (tokens,) = served.server.post("/tokenize", {"inputs": "the fox"}).json()
    assert [token["id"] for token in tokens] == served.token_ids("the fox")
    end = {"id": served.token_ids("")[-1], "text": "<|end|>", "special": True, "start": None, "stop": None}
    assert tokens[-1] == end
    assert "".join(token["text"] for token in tokens if not token["special"]) == "the fox"
    (bare,) = served.server.post("/tokenize", {"inputs": ["the fox"], "add_special_tokens": False}).json()
    assert bare == [token for token in tokens if not token["special"]]
    assert served.server.post("/tokenize", {"prompt": "the fox"}).json()["tokens"] == served.token_ids("the fox")


def test_padding_fills_the_context_with_tokens_that_are_read(served: Served) -> None:
    body = {"input": "the fox"}
    padded = served.server.post("/v1/embeddings", body | {"padding": "max_length"}).json()
    ids = served.token_ids("the fox")
    ids += [served.tokenizer.token_to_id("<|end|>")] * (CONTEXT_TOKENS - len(ids))
    assert padded["usage"]["prompt_tokens"] == CONTEXT_TOKENS
    assert distance(padded["data"][0]["embedding"], served.expect(ids)) < 1e-4
    plain = served.server.post("/v1/embeddings", body | {"padding": "do_not_pad"}).json()
    assert plain["data"] == served.server.post("/v1/embeddings", body).json()["data"]


def test_a_vector_keeps_its_own_length_if_requested(served: Served) -> None:
    answer = served.server.post("/v1/embeddings", {"input": "the fox", "use_activation": False}).json()
    mode, _ = FILES[served.kind]
    expected = embed(served.model, served.token_ids("the fox"), mode, normalizes=False)
    assert abs(float(expected.norm()) - 1) > 0.1, "the comparison could fail"
    assert distance(answer["data"][0]["embedding"], expected) < 1e-4


def test_pairs_are_scored_by_the_cosines_of_their_vectors(served: Served) -> None:
    """vLLM and sentence-transformers' similarity give the same scores."""
    documents = TEXTS[1:4]
    query, *others = (served.expect(served.token_ids(text)) for text in ["the fox", *documents])
    cosines = [float(torch.nn.functional.cosine_similarity(query, other, dim=0)) for other in others]
    assert max(cosines) - min(cosines) > 0.01, "the comparison could fail"
    scores = served.server.post("/score", {"queries": "the fox", "items": documents}).json()
    assert [one["score"] for one in scores["data"]] == pytest.approx(cosines, abs=1e-4)
    same = served.server.post("/v1/score", {"data_1": documents, "data_2": documents}).json()
    assert [one["score"] for one in same["data"]] == pytest.approx([1.0] * 3, abs=1e-4)
    ranked = served.server.post("/v1/rerank", {"query": "the fox", "documents": documents, "top_n": 2}).json()
    best = sorted(range(3), key=lambda index: -cosines[index])[:2]
    assert [one["index"] for one in ranked["results"]] == best
    ranks = served.server.post("/rerank", {"query": "the fox", "texts": documents, "return_text": True}).json()
    assert [one["text"] for one in ranks[:2]] == [documents[index] for index in best]
    cut = {"query": "the fox", "documents": ["lazy " * 50], "max_tokens_per_doc": 5}
    num_tokens = len(served.token_ids("the fox")) + 5
    assert served.server.post("/v1/rerank", cut).json()["usage"]["prompt_tokens"] == num_tokens


REFUSED_INPUTS: tuple[tuple[dict[str, Any], str], ...] = (
    ({}, "input"),
    ({"input": "a", "messages": MESSAGES}, "input"),
    ({"messages": []}, "messages"),
    ({"messages": MESSAGES, "continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
    ({"messages": [{"role": "system", "content": "a"}]}, "messages"),
    ({"messages": [{"role": "user", "content": "a b " * 600}]}, "messages"),
    ({"input": "a", "padding": "longest"}, "padding"),
    ({"input": "a", "embed_dtype": "int8"}, "embed_dtype"),
    ({"input": "a", "normalize": True}, "normalize"),
)


@pytest.mark.parametrize(("body", "param"), REFUSED_INPUTS, ids=lambda value: str(value)[:60])
def test_inputs_that_cannot_be_read_are_refused_by_name(served: Served, body: dict[str, Any], param: str) -> None:
    error = served.server.post("/v1/embeddings", body).json()["error"]
    assert error["param"] == param, error


def test_dimensions_are_those_that_the_model_was_trained_for(served: Served, client: OpenAI) -> None:
    answer = client.embeddings.create(model="tiny", input="the fox", dimensions=16)
    assert distance(answer.data[0].embedding, served.expect(served.token_ids("the fox"), 16)) < 1e-4
    whole = client.embeddings.create(model="tiny", input="the fox", dimensions=0).data[0].embedding
    assert distance(whole, served.expect(served.token_ids("the fox"))) < 1e-4
    with pytest.raises(BadRequestError, match="trained for 8, 16 and 48") as caught:
        client.embeddings.create(model="tiny", input="the fox", dimensions=9)
    assert caught.value.param == "dimensions"


def test_inputs_of_one_request_share_a_batch(served: Served) -> None:
    server = served.server
    full = 'conveyor_engine_batch_close_total{model_name="tiny",reason="full"}'

    def count() -> float:
        lines = [line for line in server.get("/metrics").text.splitlines() if line.startswith(full)]
        return float(lines[0].split()[-1]) if lines else 0.0

    steps, batches = server.metric("conveyor_engine_steps_total"), count()
    assert server.post("/v1/embeddings", {"input": ["the fox"] * 4}).status_code == 200
    wait_until(lambda: count() == batches + 1, "the batch counted")
    assert server.metric("conveyor_engine_steps_total") == steps + 1
    assert server.metric("vllm:request_success_total", finished_reason="stop") >= 4
    assert server.metric("vllm:generation_tokens_total") == 0


def test_a_list_longer_than_the_engine_s_queue_is_answered_in_order_while_others_are_served(served: Served) -> None:
    """Two lists of 300 texts and single texts are sent to an engine with four rows and a queue of 256."""
    words = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog"]
    lists = [[f"{words[n % 8]} {words[n // 8 % 8]} {words[n // 64 + shift]}" for n in range(300)] for shift in (0, 3)]
    with ThreadPoolExecutor(3) as clients:
        long = [clients.submit(served.server.post, "/v1/embeddings", {"input": texts}) for texts in lists]
        single = clients.submit(lambda: [served.server.post("/v1/embeddings", {"input": "x"}) for _ in range(10)])
        assert [answer.status_code for answer in single.result()] == [200] * 10
        for texts, answer in zip(lists, (future.result().json() for future in long), strict=True):
            assert [one["index"] for one in answer["data"]] == list(range(300))
            for number in (0, 1, 17, 150, 299):
                vector = answer["data"][number]["embedding"]
                assert distance(vector, served.expect(served.token_ids(texts[number]))) < 1e-4
    served.server.wait_load(waiting=0, running=0)


def test_the_batches_of_this_task_are_in_the_metrics(served: Served) -> None:
    closed = served.server.metric("conveyor_engine_batch_cost_count", unit="tokens")
    assert served.server.post("/v1/embeddings", {"input": [[7] * 5, [8] * 3]}).status_code == 200
    wait_until(
        lambda: served.server.metric("conveyor_engine_batch_cost_count", unit="tokens") == closed + 1, "a batch counted"
    )
    text = served.server.get("/metrics").text
    assert f'conveyor_engine_batch_padding_ratio_bucket{{le="0.0",model_name="tiny"}} {closed + 1}' in text, "packed"
    assert f'conveyor_engine_batch_wait_seconds_count{{model_name="tiny"}} {closed + 1}' in text
    wait = served.server.metric("conveyor_engine_batch_wait_seconds_sum")
    assert wait >= 0.05, "its window"


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({}, "invalid_value", "input"),
        ({"input": []}, "invalid_value", "input"),
        ({"input": [[]]}, "invalid_value", "input"),
        ({"input": ["a", 1]}, "invalid_value", "input"),
        ({"input": [-1]}, "invalid_value", "input"),
        ({"input": [384]}, "invalid_value", "input"),
        ({"input": [7] * (CONTEXT_TOKENS + 1)}, "context_length_exceeded", "input"),
        ({"input": "fox " * 5000}, "context_length_exceeded", "input"),
        ({"input": ["a"] * 8193}, "invalid_value", "input"),
        ({"input": ["a"] * 300 + ["fox " * 5000]}, "context_length_exceeded", "input[300]"),
        ({"input": "a", "encoding_format": "hex"}, "invalid_value", "encoding_format"),
        ({"input": "a", "dimensions": -1}, "invalid_value", "dimensions"),
        ({"input": "a", "dimensions": 10**30}, "invalid_value", "dimensions"),
        ({"input": ""}, "invalid_value", "input"),
        ({"input": ["a", ""]}, "invalid_value", "input"),
        ({"input": "a", "truncate_prompt_tokens": CONTEXT_TOKENS + 1}, "invalid_value", "truncate_prompt_tokens"),
        ({"input": "a", "truncate_prompt_tokens": -2}, "invalid_value", "truncate_prompt_tokens"),
        ({"input": "a", "truncation_side": "middle"}, "invalid_value", "truncation_side"),
        ({"input": "a", "priority": 1001}, "invalid_value", "priority"),
        ({"input": "a", "normalize": True}, "unsupported_value", "normalize"),
        ({"input": "a", "model": "other"}, "model_not_found", "model"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_embedded_is_refused_by_name(
    served: Served, body: dict[str, Any], code: str, param: str
) -> None:
    answer = served.server.post("/v1/embeddings", body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (
        404 if code == "model_not_found" else 400,
        code,
        param,
    )
    assert len(answer.content) < 2000
    assert code != "context_length_exceeded" or "reduce the length" in error["message"], "the API process's own words"


@pytest.mark.parametrize("text", ["the fox " * 5000, [7] * (CONTEXT_TOKENS + 9)], ids=["text", "tokens"])
def test_an_input_is_cut_to_the_context_on_request(served: Served, client: OpenAI, text: Any) -> None:
    """`vllm bench serve --backend openai-embeddings` sends -1 with each request."""
    whole, last = (served.token_ids(text)[:-1], 1) if isinstance(text, str) else (text, 0)
    for number, expected in ((CONTEXT_TOKENS, -1), (5, 5)):
        answer = client.embeddings.create(model="tiny", input=text, extra_body={"truncate_prompt_tokens": expected})
        assert answer.usage.prompt_tokens == number
        kept = whole[: number - last] + [served.tokenizer.token_to_id("<|end|>")] * last
        assert distance(answer.data[0].embedding, served.expect(kept)) < 1e-4


def test_bodies_are_bounded(served: Served) -> None:
    long = json.dumps({"input": "a" * 4 * 2**20}).encode()
    assert served.server.post("/v1/embeddings", long).status_code == 413
    deep = b'{"input":' + b"[" * 500_000
    assert served.server.post("/v1/embeddings", deep).json()["error"]["code"] == "invalid_json"
    assert served.server.post("/v1/embeddings", {"input": "a"}).status_code == 200


def test_a_body_may_be_as_long_as_many_inputs_need(served: Served) -> None:
    inputs = [[7] * CONTEXT_TOKENS] * 8
    body = json.dumps({"input": inputs}, separators=("," + 300 * " ", ":")).encode()
    assert len(body) > 2**20 > 32 * CONTEXT_TOKENS
    answer = served.server.post("/v1/embeddings", body)
    assert (answer.status_code, len(answer.json()["data"])) == (200, 8)


@pytest.mark.parametrize("path", [endpoint.path for endpoint in ENDPOINTS if endpoint.models == "generates text"])
def test_an_engine_that_embeds_generates_no_text(served: Served, path: str) -> None:
    answer = served.server.post(path, {"prompt": "a"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "wrong_task")
    assert "/v1/embeddings" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", [endpoint.path for endpoint in ENDPOINTS if "embeds" in endpoint.models])
def test_an_engine_that_generates_makes_no_embeddings(server: EngineServer, path: str) -> None:
    answer = server.post(path, {"input": "a"})
    assert (answer.status_code, error_of(answer)["code"]) == (400, "wrong_task")
    assert "generates text" in error_of(answer)["message"]


def test_the_other_pages_are_as_true(served: Served) -> None:
    model = served.server.get("/v1/models").json()["data"][0]
    assert (model["id"], model["max_model_len"]) == ("tiny", CONTEXT_TOKENS)
    assert served.server.load()["kv_cache_usage"] == 0
    assert "/v1/embeddings" in served.server.get("/openapi.json").json()["paths"]
    assert 'num_gpu_blocks="0"' in served.server.get("/metrics").text
