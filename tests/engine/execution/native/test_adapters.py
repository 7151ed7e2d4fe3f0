"""Compares the compiled kernels' LoRA adapters with their definition in float64, alone and within decoder layers."""

import itertools

import numpy as np
import pytest
import torch
from tests.engine.execution.native.checks import DTYPES, RUNS, TOLERANCE, assert_close, random
from tests.engine.execution.native.test_layer import DIM, HEADS, KV_HEADS, SHAPES, Cached, make_plain

from conveyor_engine.execution import native
from conveyor_engine.execution.native.adapters import _share

pytestmark = RUNS

RANKS = [3, 16, 40, 32, 1, 4]  # 96 columns in three panels; the third adapter lies in two of them
ENDS = np.array([0, 0, *itertools.accumulate(RANKS)], dtype=np.int32)
RANGES = np.stack((ENDS[:-1], ENDS[1:]), axis=1)


class Adapters:
    """Random adapters of a product, in the form of the definition and packed."""

    def __init__(self, num_in: int, sizes: list[int], dtype: torch.dtype) -> None:
        self.down = random(len(sizes), sum(RANKS), num_in, dtype=dtype, seed=1) / 4
        starts = [0, *itertools.accumulate(sizes)]
        self.ups = [
            (slice(start, start + size), random(sum(RANKS), size, dtype=dtype, seed=start) / 4)
            for start, size in zip(starts, sizes, strict=False)
        ]
        self.packed = self.pack()

    def pack(self) -> native.AdapterWeights:
        """Write the adapters one after another, the second half of them after the matrices have got more columns."""
        outputs, (number, columns, width) = [of for of, _ in self.ups], self.down.shape
        packed = native.AdapterWeights(width, outputs[:1], 32, self.down.dtype)
        for end in (32, columns):
            for first in range(0 if end == 32 else 32, end, 16):
                for index, (_, up) in enumerate(self.ups[: 1 if end == 32 else number]):
                    part = slice(first, first + 16)
                    packed.write(index, first, self.down[index, part], up[part])
            if end == 32:
                smaller, packed = packed, native.AdapterWeights(width, outputs, columns, self.down.dtype)
                packed.take(smaller)
                for index, (_, up) in enumerate(self.ups[1:], start=1):
                    packed.write(index, 0, self.down[index, :32], up[:32])
        return packed

    def add(self, y: torch.Tensor, x: torch.Tensor, adapters: list[int]) -> torch.Tensor:
        """Return y and what each row's adapter adds, in float64."""
        added = y.double()
        for row, adapter in enumerate(adapters):
            own = slice(*RANGES[adapter].tolist())
            for down, (outputs, up) in zip(self.down, self.ups, strict=True):
                added[row, outputs] += x[row].double() @ down[own].t().double() @ up[own].double()
        return added


def columns(adapters: list[int]) -> native.Columns:
    return native.Columns(np.array(adapters, dtype=np.int32), RANGES)


@DTYPES
@pytest.mark.parametrize("sizes", [[50], [7, 31, 12]])
@pytest.mark.parametrize(
    "adapters",
    [
        [0, 0],
        [1],
        [3],
        [6, 0],
        [1, 6, 0, 1],
        [5] * 37,
        [0, 1, 2, 3, 4, 5, 6] * 5,
        [1, *[3] * 40, 2, 6, *[0] * 33, *[6] * 50, 4],
    ],
    ids=lambda of: f"{len(of)}rows",
)
def test_each_row_gets_what_its_adapter_adds(dtype: torch.dtype, sizes: list[int], adapters: list[int]) -> None:
    rows, made = len(adapters), Adapters(45, sizes, dtype)
    x, y = random(rows, 80, dtype=dtype, seed=2)[:, 5:50], random(rows, 60, dtype=dtype, seed=3)
    before = y.clone()
    native.add_adapters(y[:, 4:54], x, made.packed, columns(adapters))
    assert_close(y[:, 4:54], made.add(before[:, 4:54], x, adapters))
    assert torch.equal(y[:, :4], before[:, :4])
    assert torch.equal(y[:, 54:], before[:, 54:])


def test_columns_may_lie_in_another_order_than_the_numbers_of_adapters() -> None:
    """So they do when an adapter has got the columns of one that left."""
    adapters = [1, 6, 0, 2, *[3] * 40, 5, 1, 4]
    made, others = Adapters(45, [7, 31, 12], torch.float32), [adapter and 7 - adapter for adapter in adapters]
    x, y = (
        random(len(adapters), 45, dtype=torch.float32, seed=2),
        random(len(adapters), 60, dtype=torch.float32, seed=3),
    )
    expected = made.add(y, x, others)
    native.add_adapters(
        y, x, made.packed, native.Columns(np.array(adapters, dtype=np.int32), RANGES[[0, 6, 5, 4, 3, 2, 1]])
    )
    assert_close(y, expected)


def test_many_neighbours_with_one_adapter_are_computed_apart() -> None:
    of_tokens = np.array([4, 6, *[3] * 40, 1, *[0] * 40, 0, 5, *[6] * 32], dtype=np.int32)
    assert list(_share(of_tokens, RANGES)) == [
        (0, 2, 1, 3),
        (2, 42, 0, 2),
        (42, 43, 0, 1),
        (84, 85, 2, 3),
        (85, 117, 2, 3),
    ]


@DTYPES
def test_an_adapter_that_overflows_changes_no_other_row(dtype: torch.dtype) -> None:
    made = Adapters(45, [50], dtype)
    made.down[:, slice(*RANGES[2].tolist())] = torch.inf
    packed = made.pack()
    adapters = [1, 2, 0, 3]
    x, y = random(4, 45, dtype=dtype), random(4, 50, dtype=dtype)
    before = y.clone()
    native.add_adapters(y, x, packed, columns(adapters))
    others = [0, 2, 3]
    assert not y[1].isfinite().any()
    assert_close(y[others], made.add(before, x, adapters)[others])


@DTYPES
def test_only_the_panels_of_adapters_in_use_are_read(dtype: torch.dtype) -> None:
    made = Adapters(45, [20, 30], dtype)
    x, y = random(2, 45, dtype=dtype), torch.zeros(2, 50, dtype=dtype)
    expected = made.add(y, x, [6, 6])
    for matrix in (*made.down, *(up for _, up in made.ups)):
        matrix[:64] = torch.nan  # the columns of the panels before
    native.add_adapters(y, x, made.pack(), columns([6, 6]))
    assert_close(y, expected)


@DTYPES
@pytest.mark.parametrize("changed", ["qkv", "out", "gate_up", "down", "all"])
def test_a_layer_adds_adapters_in_one_call_and_in_two(dtype: torch.dtype, changed: str) -> None:
    """The result is compared with that of layers whose weights have the adapter merged into them."""
    made = {
        name: Adapters(num_in, [96, 48, 48] if name == "qkv" else [num_out], dtype)
        for name, (num_out, num_in) in SHAPES.items()
        if changed in (name, "all")
    }
    plain = make_plain(dtype, True, False)
    layer, one, two = plain.layer(), Cached(dtype, 24), Cached(dtype, 24)
    layer.use_adapters(native.LayerAdapters(**{name: each.packed for name, each in made.items()}))
    step = native.CacheStep(one.starts, one.totals, [(one.slots, one.tables)])
    layers = native.Layers([layer], [one.caches], [0])
    of_tokens = columns([4, *[3] * 19, 0, 0])  # a decode, a chunk, and padding
    result = layers.forward(one.x, *one.rotation, step, 1, of_tokens)

    query, key, value = layer.before_attention(two.x, *two.rotation, of_tokens).split([HEADS, KV_HEADS, KV_HEADS], 1)
    native.kv_write(key, value, two.slots, two.caches)
    attended = native.paged_attention(query, two.caches, two.starts, two.totals, two.tables, value_dim=DIM, scaling=0.3)
    assert torch.equal(layer.after_attention(two.x, attended, of_tokens), result)

    for adapter, tokens in ((4, slice(0, 1)), (3, slice(1, 20)), (0, slice(20, 22))):
        merged = make_plain(dtype, True, False)
        for name, adapters in made.items():
            weight = merged.weights[name]
            unit = torch.eye(weight.shape[1], dtype=dtype)
            merged.weights[name] = adapters.add(weight.t(), unit, [adapter] * len(unit)).t().to(dtype).contiguous()
        expected = Cached(dtype, 24).run(merged.layer())
        assert_close(result[0, tokens], expected[0, tokens].double(), tolerance=10 * TOLERANCE[dtype])
    assert torch.equal(layers.forward(one.x, *one.rotation, step, 1), Cached(dtype, 24).run(plain.layer()))
