"""Tests how urgent a service is, and which lines a page has."""

from dataclasses import replace

import pytest

from conveyor_console.figures import Figures
from conveyor_console.overview import Line, Trouble, build_line, sort_lines
from conveyor_console.pages import Changes, build_overview
from conveyor_console.requests import Requests, sum_requests
from conveyor_console.services import Condition, Service, parse_service
from conveyor_protocol.pages import Demand, Replicas, ServiceDemand

READY = Condition("True", "Ready", "2 of 2 pods are ready")
WELL = Service("team", "qwen", READY, ready_replicas=2, desired_replicas=2)
CASES = {
    Trouble.DOWN: (replace(WELL, ready=Condition("False", "OutOfMemory", "too small")), Requests(), Figures()),
    Trouble.UNKNOWN: (Service("team", "new"), Requests(), Figures()),
    Trouble.SLOW: (replace(WELL, first_token_objective=0.2), Requests(), Figures(first_token_seconds=0.3)),
    Trouble.FULL: (replace(WELL, scaling_reason="AtMaximum"), Requests(queued=3), Figures()),
    Trouble.STARTING: (replace(WELL, ready=Condition("False", "ModelLoading", "loading")), Requests(), Figures()),
    Trouble.CHANGING: (replace(WELL, ready_replicas=1), Requests(queued=3), Figures()),
    Trouble.ASLEEP: (replace(WELL, ready_replicas=0, desired_replicas=0), Requests(), Figures()),
    Trouble.WELL: (WELL, Requests(at_engines=3), Figures(first_token_seconds=0.1)),
}


@pytest.mark.parametrize("trouble", CASES)
def test_a_service_has_the_trouble_that_its_reports_say(trouble: Trouble) -> None:
    line = build_line(*CASES[trouble])
    assert line.trouble == trouble
    assert line.reason


def test_a_service_that_has_served_and_lost_its_engines_is_down() -> None:
    for reason in ("ModelLoading", "PodsStarting"):
        new = replace(WELL, ready=Condition("False", reason, "0 of 1 pods are ready"), ready_replicas=0)
        assert build_line(new, Requests(queued=3), None).trouble is Trouble.STARTING
        assert build_line(replace(new, last_start=(("in all", "60s"),)), Requests(), None).trouble is Trouble.DOWN


def test_a_service_with_fixed_replicas_is_full_while_as_many_requests_are_queued_as_run_at_once() -> None:
    fixed = replace(WELL, conditions=(("ScalingReady", Condition("True", "FixedReplicas", "fixed")),))
    line = build_line(fixed, Requests(queued=8, at_engines=7, ready=2, places=8), None)
    assert (line.trouble, line.reason) == (Trouble.FULL, "8 requests are queued, and no more replicas are allowed")
    for queued, places in ((7, 8), (1, 8), (0, 0), (1, 0)):
        assert build_line(fixed, Requests(queued=queued, places=places), None).trouble is Trouble.WELL


def test_a_queue_at_the_maximum_hides_no_rollout() -> None:
    most = replace(WELL, scaling_reason="AtMaximum")
    line = build_line(most, Requests(queued=1, places=8), None)
    assert (line.trouble, line.reason) == (Trouble.FULL, "1 request is queued, and no more replicas are allowed")
    assert build_line(replace(most, progressing=True), Requests(queued=1), None).trouble is Trouble.CHANGING


def test_a_missed_objective_is_said_with_both_times() -> None:
    service = replace(WELL, between_tokens_objective=0.05)
    line = build_line(service, None, Figures(between_tokens_seconds=0.0821))
    assert line.reason == "between tokens: 82 ms at the 95th percentile, the objective is 50 ms"


def test_lines_begin_with_the_most_urgent_service_and_the_longest_queue() -> None:
    lines = [build_line(*case) for case in CASES.values()]
    lines += [build_line(replace(WELL, name=f"q{queued}"), Requests(queued), None) for queued in (1, 9)]
    ordered = sort_lines(lines)
    assert [line.trouble for line in ordered] == sorted(line.trouble for line in lines)
    assert [line.service.name for line in ordered if line.trouble is Trouble.WELL] == ["q9", "q1", "qwen"]


def test_batches_are_as_full_as_the_places_of_ready_engines() -> None:
    assert build_line(WELL, Requests(at_engines=6, ready=2, places=8), None).fill == 0.75
    assert build_line(WELL, Requests(at_engines=9, ready=1, places=4), None).fill == 1
    assert build_line(WELL, Requests(at_engines=1), None).fill is None
    assert build_line(WELL, None, None).fill is None


def test_requests_of_all_gateways_are_added_and_engines_are_not() -> None:
    replicas = Replicas(ready=2, starting=0, desired=2)
    page = Demand({"team/qwen": ServiceDemand(5, 1, queued=1, dispatched=4, batch_size=8, replicas=replicas)})
    assert sum_requests([page, page]) == {"team/qwen": Requests(queued=2, at_engines=8, ready=2, places=16)}


def test_a_status_that_is_older_than_the_spec_counts_as_changing() -> None:
    body = {
        "metadata": {"namespace": "team", "name": "qwen", "generation": 2},
        "spec": {"batching": {"objectives": {"timeToFirstToken": "1s500ms", "interTokenLatency": "80ms"}}},
        "status": {
            "observedGeneration": 1,
            "conditions": [{"type": "Ready", "status": "True", "reason": "Ready", "message": "all"}],
        },
    }
    service = parse_service(body)
    assert service.progressing
    assert (service.first_token_objective, service.between_tokens_objective) == (1.5, 0.08)
    assert not parse_service({**body, "status": {**body["status"], "observedGeneration": 2}}).progressing


def lines_of(count: int) -> list[Line]:
    return [build_line(replace(WELL, name=f"s{number:04}"), Requests(), None) for number in range(count)]


def test_a_page_has_fifty_lines_and_its_number_is_limited() -> None:
    lines = lines_of(1000)
    overview = build_overview(lines, "", 20, "")
    assert (len(overview.lines), overview.number, overview.num_pages) == (50, 20, 20)
    assert build_overview(lines, "", 99, "").number == 20
    assert build_overview([], "", 1, "").num_pages == 1
    assert [line.service.name for line in build_overview(lines, "team/s0999", 3, "").lines] == ["s0999"]


def test_changes_are_the_lines_that_differ_and_all_lines_if_the_order_does() -> None:
    lines, changes = lines_of(3), Changes()
    assert changes.render(build_overview(lines, "", 1, "")).count("<tr") == 3
    assert changes.render(build_overview(lines, "", 1, "")) == ""
    lines[1] = build_line(lines[1].service, Requests(queued=7), None)
    text = changes.render(build_overview(lines, "", 1, ""))
    assert text.count("<tr") == 1
    assert "s0001" in text
    assert changes.render(build_overview(lines[::-1], "", 1, "")).count("<tr") == 3
    assert "no gateway runs" in changes.render(build_overview(lines[::-1], "", 1, "no gateway runs."))
