"""What the machine allows: of which products and bytes it is made, and that the fastest kernel of each counts."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from conveyor_engine.bench import limit
from conveyor_engine.bench.limit import Limit
from conveyor_engine.bench.slices import Slice, Turn
from conveyor_engine.bench.summary import compare_with_limit
from conveyor_engine.bench.systems import Workload


class Model(torch.nn.Sequential):
    """Two matrices 4 -> 5, one 4 -> 7, and a head 4 -> 9."""

    dtype = torch.bfloat16

    def __init__(self) -> None:
        super().__init__(*(torch.nn.Linear(4, out, dtype=self.dtype) for out in (5, 5, 7, 9)))
        text = SimpleNamespace(num_hidden_layers=3, num_key_value_heads=2, head_dim=8)
        self.config = SimpleNamespace(get_text_config=lambda: text)

    def get_output_embeddings(self) -> torch.nn.Module:
        return self[3]


def test_each_product_is_by_its_fastest_kernel_as_often_as_the_work_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A made-up machine: a product takes as many seconds as its kernel says for its rows and outputs."""
    kinds = {"few": lambda rows, out: rows * out, "many": lambda rows, out: 20 * out + rows * out / 10}
    monkeypatch.setattr(limit, "builders", lambda: {k: lambda w, k=k: (kinds[k], len(w)) for k in kinds})
    monkeypatch.setattr(limit, "_each", lambda linears, x: sum(kind(len(x), out) for kind, out in linears))
    monkeypatch.setattr(limit, "shortest", lambda work: work())
    monkeypatch.setattr(limit, "read_bytes_per_second", lambda: 96.0)
    found = limit.measure_limit(Model(), Workload(requests=2, input_tokens=1000, output_tokens=4))
    of_prompts = (20 + 102.4) * (5 + 5 + 7) * 2000 / 1024
    assert found.seconds["prefill"] == pytest.approx(of_prompts + 2 * 9)
    assert found.kv_seconds == 2 * (1001 + 1002 + 1003) * (2 * 3 * 2 * 8 * 2) / 96
    assert found.seconds["decode"] == 3 * (2 * 17 + 2 * 9) + found.kv_seconds
    assert found.kernels == {"2x4x9": "few", "1024x4x5": "many", "2x4x5": "few", "1024x4x7": "many", "2x4x7": "few"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_kernel_multiplies(dtype: torch.dtype) -> None:
    weight, x = torch.randn(96, 64, dtype=dtype), torch.randn(5, 64, dtype=dtype)
    assert "torch" in limit.builders()
    for build in limit.builders().values():
        torch.testing.assert_close(build(weight)(x), x @ weight.T, rtol=0.02, atol=0.1)


def test_reading_is_measured() -> None:
    assert 1e8 < limit.read_bytes_per_second() < 1e13


def test_the_shortest_pass_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limit, "PASSES_SECONDS", 0.095)
    ticks = iter([0, 5, 10, 12, 20, 29, *(30 + n / 100 for n in range(40))])
    monkeypatch.setattr(limit.time, "perf_counter", partial(next, ticks))
    assert limit.shortest(lambda: None) == 2
    assert limit.shortest(lambda: None) == pytest.approx(0.01)
    assert next(ticks) == pytest.approx(30.2), "a tenth of a second at least"


def test_the_fraction_is_of_the_whole_and_of_each_phase() -> None:
    turns = [Turn("prefill", {"conveyor": Slice(1, 4, 0)}), Turn("decode", {"conveyor": Slice(2, 4, 0)})]
    told = compare_with_limit(turns, Limit({"prefill": 2, "decode": 3}, 1, 5e9, {}), Workload(1, 1, 3))
    assert told["limit_fraction"] == 0.625
    assert told["limit"]["fractions"] == {"prefill": 0.5, "decode": 0.75}
    assert told["limit"]["output_tokens_per_second"] == 0.6
    disturbed = [turns[0], Turn("decode", {"conveyor": Slice(2, 4, 0.5)})]
    told = compare_with_limit(disturbed, Limit({"prefill": 2, "decode": 3}, 1, 5e9, {}), Workload(1, 1, 3))
    assert (told["limit_fraction"], told["limit"]["fractions"]) == (None, {"prefill": 0.5, "decode": None})
