"""Tests the machine's limit: its products and bytes, and that the fastest kernel of each product counts."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conveyor_bench.comparing import limit
from conveyor_bench.comparing.limit import Limit, Products, Step
from conveyor_bench.comparing.slices import Slice, Turn
from conveyor_bench.comparing.summary import compare_with_limit
from conveyor_bench.comparing.systems import Conveyor, Workload, generate, write_model
from conveyor_bench.comparing.turns import random_prompts


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A fake clock. A product takes as long as its kernel defines for its rows and outputs."""
    now = [0.0]
    kinds = {"few": lambda rows, out: rows * out, "many": lambda rows, out: 20 * out + rows * out / 10}

    def build(kind: Any, weight: torch.Tensor) -> Any:
        return lambda x: now.__setitem__(0, now[0] + kind(len(x), len(weight)))

    monkeypatch.setattr(limit, "builders", lambda: {name: partial(build, kind) for name, kind in kinds.items()})
    monkeypatch.setattr(limit.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(limit, "PASSES_SECONDS", 0.0)
    return now


def test_each_product_is_by_its_fastest_kernel_for_so_many_rows(seconds: list[float]) -> None:
    products = Products([torch.nn.Linear(4, out) for out in (5, 5)])
    for rows in (2, 1000):
        products.prepare(rows)
    seconds[0] = 0
    products.run(2)
    assert seconds[0] == 2 * (2 * 5)
    products.run(1000)
    assert seconds[0] == pytest.approx(2 * (2 * 5) + 2 * (100 + 500))
    assert products.chosen == {"2x4x5": "few", "1024x4x5": "many"}


def test_it_does_what_the_engines_steps_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path, "tiny", torch.bfloat16)
    conveyor = Conveyor(tmp_path, "bfloat16", Workload(2, 9, 4), lambda _: None)
    monkeypatch.setattr(limit, "PASSES_SECONDS", 0.0)
    found = Limit(conveyor.runner)
    generate(conveyor, random_prompts(2, (9,), 1000, 1), 4)
    assert found._steps == [Step(18, 2, 0), Step(2, 2, 18), Step(2, 2, 20), Step(2, 2, 22)]
    products, reads = list[Any](), list[int]()
    monkeypatch.setattr(limit.Products, "run", lambda self, rows: products.append((self._in, self._out, rows)))
    monkeypatch.setattr(limit.Memory, "read", lambda _, num_bytes: reads.append(num_bytes))
    assert found.slice(4).tokens == 4
    shapes = [(64, 256), (128, 64), (64, 192), (96, 64)]  # q, k and v; o; gate and up; down
    further = [*shapes[1:], (64, 1000)]  # beyond the last attention, the head among them
    expected = [(*shape, n) for shape in shapes for n in (18, 2, 2, 2)] + [(*shape, 2) for shape in further] * 4
    assert sorted(products) == sorted(expected), "of two layers"
    assert reads == [tokens * (2 * 2 * 2 * 32 * 2) for tokens in (0, 18, 20, 22)]
    done = len(products), len(reads)
    found.slice(0)
    assert (len(products), len(reads)) == done, "nothing is to be done again"


def test_all_of_it_is_timed_and_nothing_that_is_done_once(tmp_path: Path, seconds: list[float]) -> None:
    write_model(tmp_path, "tiny", torch.float32)
    conveyor = Conveyor(tmp_path, "float32", Workload(1, 9, 3), lambda _: None)
    found = Limit(conveyor.runner)
    generate(conveyor, [[1] * 9], 2)
    qkv, others = 256, 64 + 192 + 64
    assert found.slice(2).seconds == (9 + 1) * (2 * qkv + others) + (1 + 1) * (others + 1000)
    assert {name for products in found._layers for name in products.chosen.values()} == {"few"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_kernel_multiplies(dtype: torch.dtype) -> None:
    weight, x = torch.randn(96, 64, dtype=dtype), torch.randn(5, 64, dtype=dtype)
    assert "torch" in limit.builders()
    for build in limit.builders().values():
        torch.testing.assert_close(build(weight)(x), x @ weight.T, rtol=0.02, atol=0.1)


def test_memory_is_read_as_far_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    monkeypatch.setattr(limit, "PASSES_SECONDS", 0.0)
    monkeypatch.setattr(limit, "_sum", lambda data: read.append(data.nbytes))
    monkeypatch.setattr(limit, "_smallest", lambda data: read.append(data.nbytes))
    memory = limit.Memory()
    memory.hold(4096)
    memory.hold(64)
    read.clear()
    memory.read(1024)
    memory.read(0)
    assert read == [1024]


def test_the_shortest_pass_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limit, "PASSES_SECONDS", 0.095)
    ticks = iter([0, 5, 10, 12, 20, 29, *(30 + n / 100 for n in range(40))])
    monkeypatch.setattr(limit.time, "perf_counter", partial(next, ticks))
    assert limit.shortest(lambda: None) == 2
    assert limit.shortest(lambda: None) == pytest.approx(0.01)
    assert next(ticks) == pytest.approx(30.2), "a tenth of a second at least"


def test_the_fraction_is_of_the_whole_and_of_each_phase() -> None:
    nothing: Any = SimpleNamespace(describe=dict)

    def compare(stolen: float) -> Any:
        decode = {"conveyor": Slice(2, 4, stolen), "limit": Slice(2, 3, 0)}
        turns = [Turn("prefill", {"conveyor": Slice(1, 4, 0), "limit": Slice(1, 2, 0)}), Turn("decode", decode)]
        return compare_with_limit(turns, nothing, Workload(1, 1, 3))

    told = compare(0.0)
    assert told["limit_fraction"] == 0.625
    assert told["limit"]["fractions"] == {"prefill": 0.5, "decode": 0.75}
    assert told["limit"]["seconds"] == {"prefill": 2, "decode": 3}
    assert told["limit"]["output_tokens_per_second"] == 0.6
    told = compare(0.5)
    assert (told["limit_fraction"], told["limit"]["fractions"]) == (None, {"prefill": 0.5, "decode": None})
