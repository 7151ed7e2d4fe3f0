"""Bodies of the Open Inference Protocol: what they bring is checked by what they say, in time."""

import json
import math
import struct
from array import array
from typing import Any

import msgspec
import pytest

from conveyor_engine.errors import InvalidRequest, UnknownModel
from conveyor_engine.serving.preparing.jobs import ServedModel
from conveyor_engine.serving.preparing.open_inference import AskedOutput, PreparedInference, prepare_inference
from conveyor_engine.serving.preparing.prompts import Prompt
from conveyor_engine.serving.preparing.sampling_defaults import SamplingDefaults
from conveyor_engine.wire.frames import FrameReader
from conveyor_engine.wire.messages import Add, to_engine_decoder
from conveyor_engine.wire.request import ModelFacts
from conveyor_engine.wire.tensors import (
    DATATYPES,
    Datatype,
    Signature,
    Tensor,
    TensorSpec,
    decode_elements,
    decode_tensors,
    encode_elements,
    encode_tensors,
)
from conveyor_engine.wire.worker import INPUTS_MAX, Job

MODEL = ServedModel("tiny", None, SamplingDefaults())
FACTS = ModelFacts(
    task="softmax", max_model_len=64, dtype="float32", device="cpu", attention_backend="none", num_kv_blocks=0,
    block_size=16, max_num_seqs=4, max_num_batched_tokens=64,
)  # fmt: skip
ONE = Signature((TensorSpec("x", "FP32", ("n",)),), (TensorSpec("y", "FP32", ("n",)),), {"n": (1, 8)})
PAIR = Signature(
    (TensorSpec("a", "INT64", (2, 2)), TensorSpec("b", "BYTES", ()), TensorSpec("c", "BOOL", (1,), is_optional=True)),
    (TensorSpec("y", "FP32", ()), TensorSpec("z", "INT8", ())),
)


def make_prompt(tensors: dict[str, Tensor], _: str) -> Prompt:
    return Prompt([], encode_tensors(tensors), sum(tensor.num_elements for tensor in tensors.values()))


def prepare(
    body: Any, signature: Signature = ONE, rest: bytes = b"", json_bytes: int | None = None
) -> PreparedInference:
    head = body if isinstance(body, bytes) else json.dumps(body).encode()
    size = len(head) if rest and json_bytes is None else json_bytes
    job = Job("tensors", FACTS, 100, 0.0, head + rest, json_bytes=size)
    return prepare_inference(MODEL, job, signature, make_prompt)


def items(prepared: PreparedInference) -> list[dict[str, Tensor]]:
    """The tensors of each engine request, as the engine gets them."""
    found = []
    for part in prepared.parts:
        (payload,) = FrameReader().feed(part.add)
        add = to_engine_decoder.decode(payload)
        assert isinstance(add, Add)
        found += [decode_tensors(request.payload) for request in add.requests(0.0)]
    return found


def tensor(
    data: Any = None, shape: Any = (1, 2), datatype: str = "FP32", name: str = "x", **more: Any
) -> dict[str, Any]:
    given = {} if data is None else {"data": data}
    return {"name": name, "shape": list(shape), "datatype": datatype, **given, **more}


def of_type(datatype: Datatype) -> Signature:
    return Signature((TensorSpec("x", datatype, (2,)),), (TensorSpec("y", "FP32", ()),))


@pytest.mark.parametrize("data", [[1, 2.5, 3, 4], [[1, 2.5], [3, 4]]], ids=["flat", "nested"])
def test_each_item_is_a_request(data: Any) -> None:
    prepared = prepare({"id": "7", "inputs": [tensor(data, (2, 2))]})
    first, second = (Tensor("FP32", (2,), array("f", numbers).tobytes()) for numbers in ([1, 2.5], [3, 4]))
    assert items(prepared) == [{"x": first}, {"x": second}]
    assert (prepared.own_id, prepared.outputs) == ("7", [AskedOutput("y", False)])


def test_several_inputs_and_outputs_of_all_kinds() -> None:
    body = {
        "inputs": [
            tensor([[[1, 2], [3, 4]], [[5, 6], [7, -8]]], (2, 2, 2), "INT64", "a"),
            tensor(["naïve", ""], (2,), "BYTES", "b"),
            tensor([[True], [0 == 1]], (2, 1), "BOOL", "c"),
        ],
        "outputs": [{"name": "z", "parameters": {"binary_data": False}}, {"name": "y"}],
        "parameters": {"binary_data_output": True, "priority": 3, "own": "x"},
    }
    prepared = prepare(body, PAIR)
    assert prepared.outputs == [AskedOutput("z", False), AskedOutput("y", True)]
    first, second = items(prepared)
    assert second["a"].data == array("q", [5, 6, 7, -8]).tobytes()
    assert list(decode_elements(first["b"].data)) == ["naïve".encode()]
    assert (first["c"].data, second["c"].data) == (b"\1", b"\0")
    del body["inputs"][2]  # type: ignore[attr-defined]
    assert items(prepare(body, PAIR))[0].keys() == {"a", "b"}


def test_binary_data_lie_behind_the_json_in_the_order_of_the_inputs() -> None:
    numbers, texts = array("q", range(8)).tobytes(), encode_elements([b"\xff\x00", b"abc"])
    inputs = [
        tensor(shape=(2, 2, 2), datatype="INT64", name="a", parameters={"binary_data_size": len(numbers)}),
        tensor(shape=(2,), datatype="BYTES", name="b", parameters={"binary_data_size": len(texts)}),
    ]
    first, second = items(prepare({"inputs": inputs}, PAIR, numbers + texts))
    assert first["a"].data + second["a"].data == numbers
    assert list(decode_elements(second["b"].data)) == [b"abc"]
    with pytest.raises(InvalidRequest, match="1 bytes after the JSON do not belong to an input"):
        prepare({"inputs": inputs}, PAIR, numbers + texts + b"x")
    with pytest.raises(InvalidRequest, match="has binary_data_size 13, but the body has only 12 bytes left"):
        prepare({"inputs": inputs}, PAIR, (numbers + texts)[:-1])


@pytest.mark.parametrize("datatype", [kind for kind in DATATYPES if kind not in ("BYTES", "BF16", "BOOL")])
def test_a_number_travels_as_its_datatype_or_is_refused(datatype: Datatype) -> None:
    code = {"FP16": "e", "FP32": "f", "FP64": "d"}.get(datatype) or "bhiqBHIQ"[
        ["INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64"].index(datatype)
    ]
    bits = int(datatype.strip("UINTFP"))
    most = {"FP16": 65504.0, "FP32": 3.4e38, "FP64": 1e308}.get(datatype) or (
        2**bits - 1 if datatype[0] == "U" else 2 ** (bits - 1) - 1
    )
    (item,) = items(prepare({"inputs": [tensor([most, 1], (1, 2), datatype)]}, of_type(datatype)))
    assert item["x"].data == struct.pack(f"<2{code}", most, 1)
    for wrong in (10**400, most * 2 + 1, "1", None, True, [1], {}, math.nan, math.inf):
        with pytest.raises(InvalidRequest, match=r"inputs\[0\].data"):
            prepare({"inputs": [tensor([wrong, 1], (1, 2), datatype)]}, of_type(datatype))


WRONG: list[tuple[Any, str]] = [
    ({}, "inputs is missing"),
    ([], "must be a JSON object"),
    ({"inputs": []}, "inputs"),
    ({"inputs": [tensor([1, 2])] * 65}, "inputs"),
    ({"inputs": [tensor([1, 2])] * 2}, "appears twice"),
    ({"inputs": [tensor([1, 2], name="w" * 1000)]}, "this model takes x"),
    ({"inputs": [tensor([1, 2], datatype="INT64")]}, "x has FP32"),
    ({"inputs": [tensor([1, 2], datatype="FP31")]}, "the protocol has BOOL"),
    ({"inputs": [tensor([1, 2], (2,))]}, "n is 1 to 8"),
    ({"inputs": [tensor([1] * 9, (1, 9))]}, "n is 1 to 8"),
    ({"inputs": [tensor([], (1, 0))]}, "n is 1 to 8"),
    ({"inputs": [tensor([], (0, 2))]}, "first dimension is 0"),
    ({"inputs": [tensor([1, 2], (-1, -2))]}, "shape"),
    ({"inputs": [tensor([1, 2], (1, 2.0))]}, "shape"),
    ({"inputs": [tensor([1, 2], (1, True))]}, "shape"),
    ({"inputs": [tensor([1, 2], (2**31, 2))]}, "shape"),
    ({"inputs": [tensor([1, 2], (2**31 - 1, 8))]}, "needs 17179869176"),
    ({"inputs": [tensor([1, 2], [1] * 17)]}, "shape"),
    ({"inputs": [tensor([1, 2], [])]}, "shape"),
    ({"inputs": [tensor([1], (1, 2))]}, "has 1 elements"),
    ({"inputs": [tensor([[1, 2], [3]], (2, 2))]}, "not nested"),
    ({"inputs": [tensor([[1, 2], 3], (2, 2))]}, "not nested"),
    ({"inputs": [tensor([[[1], [2]]], (1, 2))]}, "must contain only numbers"),
    ({"inputs": [tensor({"0": 1}, (1, 2))]}, "data must be an array"),
    ({"inputs": [tensor(None, (1, 2))]}, "either data or"),
    ({"inputs": [tensor([1, 2], parameters={"binary_data_size": 8})]}, "either data or"),
    ({"inputs": [tensor(parameters={"binary_data_size": 8})]}, "body has only 0 bytes left"),
    ({"inputs": [tensor(parameters={"binary_data_size": -8})]}, "binary_data_size"),
    ({"inputs": [tensor([1, 2], parameters={"shared_memory_region": "r"})]}, "share no memory"),
    ({"inputs": [tensor([1, 2])], "outputs": [{"name": "x"}]}, "this model has y"),
    ({"inputs": [tensor([1, 2])], "outputs": [{"name": "y"}] * 2}, "appears twice"),
    ({"inputs": [tensor([1, 2])], "outputs": [{"name": "y", "parameters": {"classification": 2}}]}, "not supported"),
    ({"inputs": [tensor([1, 2])], "parameters": {"sequence_id": 4}}, "keep nothing between requests"),
    ({"inputs": [tensor([1, 2])], "id": "i" * 1025}, "id"),
    ({"inputs": [tensor([0.5] * (INPUTS_MAX + 1), (INPUTS_MAX + 1, 1))]}, "8192 that one request may have"),
    (b"\xff", "not JSON"),
    (b'{"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [NaN, 1]}]}', "FP32 cannot represent"),
    (b'{"inputs": ' + b"[" * 100_000, "not JSON"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "words"), WRONG, ids=[str(number) for number in range(len(WRONG))])
def test_what_does_not_fit_is_refused(body: Any, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        prepare(body)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_nested_lists_are_taken_apart_no_deeper_than_the_shape() -> None:
    deep: Any = [1, 2]
    for _ in range(100):
        deep = [deep]
    with pytest.raises(InvalidRequest, match="not nested as its shape"):
        prepare({"inputs": [tensor(deep)]})


def test_inputs_have_one_number_of_items() -> None:
    inputs = [tensor([[[1, 2], [3, 4]]], (1, 2, 2), "INT64", "a"), tensor(["a", "b"], (2,), "BYTES", "b")]
    with pytest.raises(InvalidRequest, match="a 1, b 2"):
        prepare({"inputs": inputs}, PAIR)
    with pytest.raises(InvalidRequest, match="inputs lack b"):
        prepare({"inputs": inputs[:1]}, PAIR)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\x05\0\0\0ab", "end within an element"),
        (b"\x01\0", "end within a length"),
        (b"\xff\xff\xff\xff", "end within an element"),
        (encode_elements([b"a", b"b"]), "has 2 elements"),
        (b"", "has 0 elements"),
    ],
)
def test_binary_strings_must_be_whole(data: bytes, words: str) -> None:
    signature = Signature((TensorSpec("x", "BYTES", ()),), (TensorSpec("y", "FP32", ()),))
    body = {"inputs": [tensor(shape=(1,), datatype="BYTES", parameters={"binary_data_size": len(data)})]}
    head = json.dumps(body).encode()
    with pytest.raises(InvalidRequest, match=words):
        prepare(head, signature, data, json_bytes=len(head))


def test_the_header_of_binary_data_is_not_beyond_the_body() -> None:
    with pytest.raises(InvalidRequest, match="the JSON has 1000 bytes by its header"):
        prepare({"inputs": [tensor([1, 2])]}, json_bytes=1000)


def test_bf16_comes_as_binary_data_alone() -> None:
    with pytest.raises(InvalidRequest, match="BF16, which JSON cannot represent"):
        prepare({"inputs": [tensor([1, 2], datatype="BF16")]}, of_type("BF16"))
    body = {"inputs": [tensor(datatype="BF16", parameters={"binary_data_size": 4})]}
    assert items(prepare(body, of_type("BF16"), b"\x80\x3f\0\0"))[0]["x"].data == b"\x80\x3f\0\0"


def test_a_model_in_the_body_must_be_the_served_one() -> None:
    with pytest.raises(UnknownModel):
        prepare({"model": "other", "inputs": [tensor([1, 2])]})


def test_lengths_of_one_name_are_equal() -> None:
    inputs = (TensorSpec("ids", "INT64", ("n",)), TensorSpec("mask", "BOOL", ("n", 2, "m")))
    signature = Signature(inputs, (TensorSpec("y", "FP32", ()),), {"n": (1, 8), "m": (0, 3)})
    body = {"inputs": [tensor([1, 2], (1, 2), "INT64", "ids"), tensor([], (1, 2, 2, 0), "BOOL", "mask")]}
    assert items(prepare(body, signature))[0]["mask"].shape == (2, 2, 0)
    body["inputs"][1] = tensor([], (1, 3, 2, 0), "BOOL", "mask")
    words = r"\[1, 3, 2, 0\], but mask has \[batch, n, 2, m\]; n is 2; m is 0 to 3"
    with pytest.raises(InvalidRequest, match=words):
        prepare(body, signature)


def test_a_signature_travels() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(PAIR), type=Signature) == PAIR
