"""Tests that files of torch.save are read as torch reads them, and that no file takes more than its layer."""

import time
import tracemalloc
from contextlib import suppress
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile

import pytest
import torch
from torch import nn

from conveyor_engine.errors import ModelError
from conveyor_engine.tasks.embed.execution.torch_files import read_linear

SIZE = 64
MUCH = 1 << 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_layer_is_read_as_torch_reads_it(tmp_path: Path, dtype: torch.dtype) -> None:
    linear = nn.Linear(SIZE, 3, dtype=dtype)
    torch.save(linear.state_dict(), tmp_path / "linear.pt")
    found = read_linear(tmp_path / "linear.pt", SIZE).state_dict()
    assert {name: (tensor.dtype, tensor.tolist()) for name, tensor in found.items()} == {
        name: (torch.float32, tensor.float().tolist()) for name, tensor in linear.state_dict().items()
    }


def text(value: str) -> bytes:
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


def number(value: int) -> bytes:
    return b"J" + value.to_bytes(4, "little", signed=True)


def tensor(shape: tuple[int, ...], stride: tuple[int, ...]) -> bytes:
    """Return the operations for a tensor over the numbers of `data/0`."""
    sizes, strides = (b"(" + b"".join(map(number, each)) + b"t" for each in (shape, stride))
    storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + number(1) + b"tQ"
    hooks = b"\x89ccollections\nOrderedDict\n)R"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + number(0) + sizes + strides + hooks + b"tR"


def nested(depth: int) -> bytes:
    """Return the operations for a tuple that prints 2 ** depth tuples."""
    return b")" + b"".join(b"q" + bytes([level]) + b"h" + bytes([level]) + b"\x86" for level in range(depth))


WEIGHT, BIAS = text("weight") + tensor((1, SIZE), (SIZE, 1)), text("bias") + tensor((1,), (1,))
EXPANDED = text("weight") + tensor((1, SIZE), (0, 0))
WIDE = text("weight") + tensor((MUCH, SIZE), (SIZE, 1)) + text("bias") + tensor((MUCH,), (1,))
MANY = b"".join(text(f"w{index}") + tensor((1, MUCH), (MUCH, 1)) for index in range(100))
PICKLES: dict[str, tuple[bytes, Any]] = {
    "nothing": (b"\x80\x02}.", {}),
    "an item of a text": (b"\x80\x02" + text("x") + text("a") + text("b") + b"s.", {}),
    "numbers that are compressed": (b"\x80\x02}(" + WIDE + b"u.", {"data/0": bytes(4 * MUCH)}),
    "one storage under many names": (b"\x80\x02}(" + MANY + b"u.", {"data/0": bytes(4 * MUCH)}),
    "a call of nested tuples": (b"\x80\x02" + nested(200) + b")R.", {}),
    "a name of nested tuples": (b"\x80\x02}" + nested(200) + text("b") + b"s.", {}),
    "a shape of nested tuples": (b"\x80\x02}(" + WEIGHT + text("bias") + b"(NN" + nested(200) + b"tu.", {}),
    "an expanded weight": (b"\x80\x02}(" + EXPANDED + BIAS + b"u.", {"data/0": b"1234"}),
    "too few numbers": (b"\x80\x02}(" + WEIGHT + BIAS + b"u.", {"data/0": bytes(8)}),
}  # fmt: skip


@pytest.mark.parametrize("what", PICKLES)
def test_other_files_are_refused_at_little_cost(tmp_path: Path, what: str) -> None:
    pickle, parts = PICKLES[what]
    path = tmp_path / "linear.pt"
    with ZipFile(path, "w", ZIP_DEFLATED if "compressed" in what else ZIP_STORED) as archive:
        archive.writestr("a/data.pkl", pickle)
        for name, content in parts.items():
            archive.writestr(f"a/{name}", content)
    tracemalloc.start()
    started = time.process_time()
    with pytest.raises(ModelError, match=r"linear\.pt is not a file of torch\.save with one linear layer: ") as caught:
        read_linear(path, SIZE)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(str(caught.value)) < len(str(path)) + 300
    assert peak < 16 << 20
    assert time.process_time() - started < 5


def test_a_file_whose_parts_are_damaged_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "linear.pt"
    torch.save(nn.Linear(SIZE, 1).state_dict(), path)
    whole = bytearray(path.read_bytes())
    for place in range(0, len(whole), 97):
        damaged = whole.copy()
        damaged[place] ^= 0xFF
        path.write_bytes(damaged)
        with suppress(ModelError):
            read_linear(path, SIZE)
