"""Checks that objectives may be written as in the spec, or in short form."""

import pytest

from conveyor_load.objectives import Objectives, parse_objectives


def test_short_and_long_names_are_the_same() -> None:
    assert parse_objectives("ttft=500ms,itl=40ms") == Objectives(0.5, 0.04)
    assert parse_objectives("timeToFirstToken=500ms, interTokenLatency=40ms") == Objectives(0.5, 0.04)
    assert parse_objectives("latency=2s").items() == [("latency", 2.0)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be such as"),
        ("speed=1s", "must be such as"),
        ("ttft", "must be such as"),
        ("ttft=fast", "is not a duration"),
        ("ttft=0s", "between"),
        ("latency=2h", "between"),
        ("ttft=1s,timeToFirstToken=2s", "twice"),
    ],
)
def test_what_is_no_objective_is_reported(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_objectives(text)
