"""Checks that the simulator's HPA decides the same as the controller of kube-controller-manager."""

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
from tests.cli.insight.recording import CONTROLLER, HPAS, RECORDED, record

from conveyor_api import names
from conveyor_insight.hpa import Hpa

Json = dict[str, Any]
ALL_RECORDED: list[Json] = json.loads(RECORDED.read_text())


def replay(body: Json, rows: Iterable[Sequence[Any]], slack_seconds: float) -> Iterator[tuple[set[int], int]]:
    """Yield for each decision: the simulator's results at, before and after the recorded time, and the controller's
    result.

    The period of a policy may end between our record and the controller's decision. The simulator gets the controller's
    history, so that one difference does not cause others.
    """
    hpa = Hpa(body, CONTROLLER)
    for (at, replicas, in_flight, depth), (_, then, _, _) in pairwise(rows):
        proposal = hpa.proposal(replicas, {names.IN_FLIGHT_METRIC: in_flight, names.QUEUE_DEPTH_METRIC: depth})
        yield {hpa.limit(at + slack, replicas, proposal) for slack in (-slack_seconds, 0, slack_seconds)}, then
        hpa.note(at, replicas, proposal, then)


@pytest.mark.parametrize("recorded", ALL_RECORDED, ids=lambda recorded: recorded["body"]["metadata"]["name"])
def test_each_look_of_a_recorded_controller_is_found_again(recorded: Json) -> None:
    looks = list(replay(recorded["body"], recorded["rows"], slack_seconds=0))
    assert len(looks) > 50
    assert [(number, found, then) for number, (found, then) in enumerate(looks) if found != {then}] == []


def test_what_was_recorded_moves_up_and_down_and_loses_metrics() -> None:
    rows = [row for recorded in ALL_RECORDED for row in recorded["rows"]]
    assert {recorded["body"]["metadata"]["name"] for recorded in ALL_RECORDED} == set(HPAS)
    assert len({replicas for _, replicas, _, _ in rows}) > 12
    assert sum(in_flight is None for _, _, in_flight, _ in rows) > 10


@pytest.mark.nightly
def test_a_controller_of_today_is_found_again() -> None:
    for hpa in record(20):
        looks = list(replay(hpa.body, hpa.rows, slack_seconds=0.5))
        assert [(number, found, then) for number, (found, then) in enumerate(looks) if then not in found] == [], (
            hpa.name
        )
