"""Runs docs/measuring.md's command that compares two gateways."""

import json

import pytest
from tests.bench.commands import run

from conveyor_bench.gateway.beside import DIRECT, NOW, OTHER, Answers, compare


@pytest.mark.slow
@pytest.mark.parametrize("against", ["", "--against HEAD"])
def test_two_gateways_are_compared(against: str) -> None:
    result = json.loads(run("gateway-beside", f"{against} --rounds 2 --seconds 0.5").splitlines()[-1])
    assert (result["rounds"], result["requests"]) == (2, 100)
    assert result["cpu_microseconds"].keys() == result["added_p50_ms"].keys() == {NOW, OTHER}


def test_the_ratio_is_of_what_both_gateways_add() -> None:
    result = compare(
        {
            DIRECT: Answers([1.0, 2.0, 1.0], 0.0, 30),
            NOW: Answers([3.0, 4.0, 6.0], 0.3, 30),
            OTHER: Answers([2.0, 3.0, 2.0], 0.2, 20),
        }
    )
    assert result["added_p50_ms"] == {NOW: 2000, OTHER: 1000}
    assert result["added_p50_ratio"] == 2
    assert result["ratio_quartiles"] == [2, 2, 3.5]
    assert result["cpu_ratio"] == pytest.approx(1)
