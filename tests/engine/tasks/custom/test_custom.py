"""Tests custom models in the engine's core: every item gets the same result as alone, whatever is in its batch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.tasks.custom.programs import LENGTH_MAX, WRITERS

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.errors import ConfigError, InvalidRequest, ModelError
from conveyor_engine.execution.build import build_runner
from conveyor_engine.loop.core import EngineCore
from conveyor_engine.tasks.custom.execution.exported import ExportedProgram
from conveyor_engine.tasks.custom.execution.python import find_problem
from conveyor_engine.tasks.custom.execution.tensors import read_tensor, write_tensor
from conveyor_engine.tasks.custom.facts import read_facts
from conveyor_engine.tasks.custom.model import Batch, Batching, Model, TensorSpec
from conveyor_engine.wire.request import EngineRequest, FinishReason, RequestOutput, SamplingParams
from conveyor_engine.wire.tensors import (
    Signature,
    Tensor,
    decode_elements,
    decode_tensors,
    encode_elements,
    encode_tensors,
)

CLASSES = "tests.engine.tasks.custom.programs"


def start(folder: Path, **changes: Any) -> EngineCore:
    changes = {"device": "cpu", "batching_mode": "dynamic", "max_num_seqs": 4, "task": "custom"} | changes
    config = EngineConfig(model=str(folder), **changes)
    return EngineCore(config, build_runner(config))


def run_items(core: EngineCore, items: list[dict[str, Tensor]]) -> list[RequestOutput]:
    for number, item in enumerate(items):
        cost = max(1, sum(tensor.num_elements for tensor in item.values()))
        core.add_request(EngineRequest(request_id=str(number), payload=encode_tensors(item), payload_cost=cost))
    core.drain()
    outputs: dict[str, RequestOutput] = {}
    now = 0.0
    while core.has_unfinished():
        outputs |= {output.request_id: output for output in core.step(now)}
        now += 1
    return [outputs[str(number)] for number in range(len(items))]


def make_items(signature: Signature, number: int) -> list[dict[str, Tensor]]:
    torch.manual_seed(number)
    items = []
    for _ in range(number):
        lengths = {name: int(torch.randint(least, most + 1, ())) for name, (least, most) in signature.lengths.items()}
        item = {}
        for spec in signature.inputs:
            shape = signature.fill(spec, lengths)
            numbers = torch.randn(shape) if spec.datatype == "FP32" else torch.randint(0, 16, shape)
            item[spec.name] = write_tensor(numbers.to(torch.uint8) if spec.datatype == "UINT8" else numbers)
        items.append(item)
    return items


def run_alone(program: ExportedProgram, item: dict[str, Tensor]) -> Batch:
    tensors = {name: read_tensor(tensor) for name, tensor in item.items()}
    length = max((tensor.shape[0] if tensor.dim() else 1) for tensor in tensors.values())
    with torch.inference_mode():
        if program.batching.ragged == "pack":
            return program.run(tensors | {"offsets": torch.tensor([0, length])})
        made = {"mask": torch.ones(1, length, dtype=torch.bool)} if program.batching.mask else {}
        return program.run({name: tensor[None] for name, tensor in tensors.items()} | made)


@pytest.mark.parametrize("mode", ["none", "static", "dynamic"])
@pytest.mark.parametrize("kind", WRITERS)
def test_each_item_gets_what_it_gets_alone(kind: str, mode: str, tmp_path: Path) -> None:
    WRITERS[kind](tmp_path)
    max_model_len = LENGTH_MAX if kind == "bag" else None
    core = start(tmp_path, batching_mode=mode, max_model_len=max_model_len)
    program = ExportedProgram(tmp_path, torch.device("cpu"), max_model_len)
    signature = read_facts(core.facts).signature
    items = make_items(signature, 23)
    steps = core.stats().num_steps
    outputs = run_items(core, items)
    assert core.stats().num_steps - steps >= (23 if mode == "none" else 6)
    for item, output in zip(items, outputs, strict=True):
        assert (output.finish_reason, output.message) == (FinishReason.STOP, None)
        assert output.payload is not None
        found, alone = decode_tensors(output.payload), run_alone(program, item)
        assert found.keys() == {spec.name for spec in signature.outputs}
        for spec in signature.outputs:
            expected = alone[spec.name]
            assert isinstance(expected, torch.Tensor)
            own = read_tensor(found[spec.name])
            packed = program.batching.ragged == "pack" and spec.shape[0] == "length"
            assert torch.allclose(own, expected if packed else expected[0], atol=1e-5)


@pytest.mark.slow
def test_a_padded_batch_costs_its_number_times_the_longest_and_a_packed_one_the_sum(tmp_path: Path) -> None:
    for kind, packs in (("encoder", False), ("bag", True), ("conv", True), ("dense", True)):
        WRITERS[kind](tmp_path / kind)
        core = start(tmp_path / kind, max_model_len=LENGTH_MAX, warmup=False)
        assert read_facts(core.facts).packs == packs
        largest = {"encoder": LENGTH_MAX, "bag": LENGTH_MAX, "conv": 64, "dense": 5}[kind]
        assert (core.facts.max_model_len, core.facts.max_num_batched_tokens) == (largest, 4 * largest)


def words(text: bytes, times: int = 1) -> dict[str, Tensor]:
    numbers = write_tensor(torch.tensor([times]))
    return {"text": Tensor("BYTES", (), encode_elements([text])), "times": numbers}


@pytest.fixture
def spoken(tmp_path: Path) -> EngineCore:
    (tmp_path / "suffix").write_bytes(b"!")
    return start(tmp_path, model_class=f"{CLASSES}:Words", max_num_seqs=16)


def test_a_class_takes_strings_and_gives_strings(spoken: EngineCore) -> None:
    outputs = run_items(spoken, [words(b"one"), words(b"two", 3), words(b"")])
    found = [decode_tensors(output.payload or b"") for output in outputs]
    assert [list(decode_elements(each["upper"].data)) for each in found] == [[b"ONE!"], [b"TWOTWOTWO!"], [b"!"]]
    assert [read_tensor(each["length"]).item() for each in found] == [4, 10, 1]


@pytest.mark.parametrize("bad", [{3}, {0, 15}, set(range(16)), {5, 6, 7}])
def test_items_that_a_model_refuses_fail_alone(bad: set[int], spoken: EngineCore) -> None:
    outputs = run_items(spoken, [words(b"bad" if number in bad else b"good") for number in range(16)])
    for number, output in enumerate(outputs):
        if number in bad:
            assert output.finish_reason is FinishReason.ERROR
            assert output.message == "the model cannot compute this item: ValueError: no bad words, please"
        else:
            assert output.finish_reason is FinishReason.STOP
    assert run_items(spoken, [words(b"good")])[0].finish_reason is FinishReason.STOP


def test_a_class_pads_and_answers_are_cut(tmp_path: Path) -> None:
    core = start(tmp_path, model_class=f"{CLASSES}:Mean", max_model_len=50)
    assert read_facts(core.facts).signature.lengths == {"n": (1, 50)}
    rows = [torch.arange(1, length + 1, dtype=torch.float32) for length in (1, 7, 50, 3)]
    for row, output in zip(rows, run_items(core, [{"numbers": write_tensor(row)} for row in rows]), strict=True):
        found = decode_tensors(output.payload or b"")
        assert torch.allclose(read_tensor(found["mean"]), row.mean())
        assert torch.allclose(read_tensor(found["centred"]), row - row.mean())


class Wrong(Model):
    """Returns other outputs than it declares."""

    inputs = (TensorSpec("x", "FP32", (2,)),)
    outputs = (TensorSpec("y", "FP32", (2,)),)

    def run(self, batch: Batch) -> Batch:
        x = batch["x"]
        assert isinstance(x, torch.Tensor)
        return {"y": x.double()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"dtype": "bfloat16"}, ConfigError, "`dtype: bfloat16` is set, and the model computes in float32"),
        ({"max_num_seqs": 65}, ConfigError, "batches of at most 64, and `max_num_seqs` allows 65 items"),
        ({"model_class": "tests.nowhere:Model"}, ConfigError, "which this image does not have"),
        ({"model_class": f"{CLASSES}:Nothing"}, ConfigError, "which is no class that extends"),
        ({"model_class": f"{CLASSES}:Absent"}, ConfigError, "which is no class that extends"),
        ({"model_class": f"{CLASSES}:Words"}, ModelError, "cannot be loaded: FileNotFoundError"),
        ({"model_class": f"{__name__}:Wrong"}, ModelError, "cannot compute its largest batch, 4 items of zeros: Val"),
    ],
)
def test_what_cannot_run_does_not_start(
    changes: dict[str, Any], error: type[Exception], words: str, tmp_path: Path
) -> None:
    WRITERS["dense"](tmp_path)
    with pytest.raises(error, match=words):
        start(tmp_path, **changes)


def test_a_request_for_tokens_is_refused(tmp_path: Path) -> None:
    WRITERS["dense"](tmp_path)
    with pytest.raises(InvalidRequest, match="computes tensors only"):
        start(tmp_path, warmup=False).add_request(EngineRequest(request_id="1", params=SamplingParams()))


X, Y = TensorSpec("x", "FP32", ("n",)), TensorSpec("y", "FP32", ())
N = {"n": (1, 5)}


@pytest.mark.parametrize(
    ("signature", "batching", "problem"),
    [
        (Signature((X,), (Y,), N), Batching(), None),
        (Signature((X,), (Y,), N), Batching(ragged="pack", offsets="o"), None),
        (Signature((), (Y,)), Batching(), "it needs an input and an output"),
        (Signature((X, X), (Y,), N), Batching(), "two tensors of one name"),
        (Signature((X,), (Y,), N), Batching(ragged="pad", mask="x"), "two tensors of one name"),
        (Signature((X,), (Y,)), Batching(), "x has the length 'n', and `lengths` does not have it"),
        (Signature((TensorSpec("x", "FP32", (-1,)),), (Y,)), Batching(), "name a length that varies"),
        (Signature((X,), (Y,), {"n": (5, 1)}), Batching(), "is from 5 to 1"),
        (Signature((TensorSpec("x", "BYTES"),), (Y,)), Batching(ragged="pad"), "take neither inputs of BYTES"),
        (Signature((TensorSpec("x", "FP32", (2,)),), (Y,)), Batching(ragged="pack", offsets="o"), "needs one length"),
        (Signature((X,), (Y,), N), Batching(ragged="pack"), "need each other"),
        (Signature((X,), (Y,), N), Batching(lengths="l"), "are for `ragged"),
    ],
)
def test_a_class_that_cannot_be_is_refused(signature: Signature, batching: Batching, problem: str | None) -> None:
    found = find_problem(signature, batching)
    assert found is problem if problem is None else problem in (found or "")


@pytest.mark.slow
def test_a_length_that_is_not_the_batchs_own_fails_its_item(tmp_path: Path) -> None:
    """Workers compare shapes with the signature. An item that passes but that the model rejects fails alone."""
    WRITERS["encoder"](tmp_path)
    core = start(tmp_path)
    good = {"ids": write_tensor(torch.tensor([1, 2, 3]))}
    bad = {"ids": write_tensor(torch.tensor([1, 99]))}
    reasons = [output.finish_reason for output in run_items(core, [good, bad, good])]
    assert reasons == [FinishReason.STOP, FinishReason.ERROR, FinishReason.STOP]
