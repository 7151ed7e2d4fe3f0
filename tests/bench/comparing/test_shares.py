"""Tests the shares of a step: each part without the parts that it calls, and all parts of a real engine."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from conveyor_bench.comparing import shares
from conveyor_bench.comparing.systems import Conveyor, Workload, write_model
from conveyor_bench.comparing.turns import random_prompts


def test_a_part_is_charged_without_what_it_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(shares.time, "perf_counter", lambda: now[0])

    def spend(seconds: float) -> None:
        now[0] += seconds

    def step() -> str:
        spend(1)
        inner.attend()
        spend(2)
        return "done"

    def fail() -> None:
        spend(4)
        raise ValueError

    inner, outer = SimpleNamespace(attend=lambda: spend(10)), SimpleNamespace(step=step, fail=fail)
    clock = shares.Clock()
    for part, owner, name in (("attention", inner, "attend"), ("host", outer, "step"), ("sampling", outer, "fail")):
        clock.time(part, owner, name)
    assert outer.step() == "done"
    spend(100)
    inner.attend()
    with pytest.raises(ValueError):
        outer.fail()
    spent = {part: seconds for part, seconds in clock.take().items() if seconds}
    assert spent == {"attention": 20, "host": 3, "sampling": 4}
    assert not any(clock.take().values())


def test_every_part_of_the_engine_is_found(tmp_path: Path) -> None:
    write_model(tmp_path, "tiny", torch.bfloat16)
    conveyor = Conveyor(tmp_path, "bfloat16", Workload(3, 9, 4), lambda _: None)
    attention = conveyor.runner.model.model.layers[0].layers[0].self_attn
    assert list(shares._parts_of(attention)) == [("rope", "_rope")], "beside the table of angles"
    found = shares.measure_shares(conveyor, [random_prompts(3, (9,), 1000, seed) for seed in (1, 2)], 4)
    assert {phase: len(all_) for phase, all_ in found.items()} == {"prefill": 2, "decode": 2 * 3}
    assert {part for part in shares.PARTS if found["prefill"][0][part]} == set(shares.PARTS)
    assert all(found["decode"][0].values())


def test_the_quicker_half_is_told_beside_its_limit() -> None:
    def step(linears: float, host: float) -> dict[str, float]:
        return dict.fromkeys(shares.PARTS, 0.0) | {"linears": linears, "host": host}

    found = {"prefill": [step(8, 2)], "decode": [step(3, 1), step(50, 50), step(2, 2)]}
    told = shares.summarise_shares(found, {"prefill": 5, "decode": 6}, Workload(1, 1, 4))
    assert (told["prefill"]["milliseconds"], told["prefill"]["limit_milliseconds"]) == (10_000, 5_000)
    assert (told["decode"]["milliseconds"], told["decode"]["limit_milliseconds"]) == (4_000, 2_000)
    assert (told["decode"]["shares"]["linears"], told["decode"]["shares"]["host"]) == (0.625, 0.375)
    assert "decode" not in shares.summarise_shares(
        found | {"decode": []}, {"prefill": 5, "decode": None}, Workload(1, 1, 1)
    )
