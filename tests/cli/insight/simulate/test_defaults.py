"""Checks the limits by which the operator's defaults were chosen (docs/adr/0024-a-step-up-waits-for-its-pods.md)."""

from dataclasses import replace

import pytest

from conveyor_api.autoscaling import Behavior, ScalingPolicy, ScalingRules
from conveyor_insight.simulate.run import Case, Run
from conveyor_insight.simulate.scenarios import PLAIN, build_scenarios

CASES = {case.name: case for case in build_scenarios()}
KUBERNETES = ScalingRules(
    policies=[
        ScalingPolicy(type="Pods", value=4, period_seconds=15),
        ScalingPolicy(type="Percent", value=100, period_seconds=15),
    ]
)


def as_kubernetes_would(case: Case) -> Case:
    assert PLAIN.autoscaling is not None
    autoscaling = PLAIN.autoscaling.model_copy(update={"behavior": Behavior(scale_up=KUBERNETES)})
    (found,) = (
        each
        for each in build_scenarios(PLAIN.model_copy(update={"autoscaling": autoscaling}))
        if each.name == case.name
    )
    return found


@pytest.mark.parametrize(("start_seconds", "kubernetes"), [(60, 6), (120, 8), (300, 13)])
def test_a_step_does_not_run_away_while_pods_start(start_seconds: int, kubernetes: int) -> None:
    case = CASES[f"step-start-{start_seconds}"]
    now, before = Run(case, 0).go(), Run(as_kubernetes_would(case), 0).go()
    assert (now.peak, before.peak) == (6, kubernetes)
    assert now.wait(0.95) <= before.wait(0.95) + 3
    assert now.failed <= before.failed


@pytest.mark.slow
def test_a_large_step_fails_fewer_where_pods_start_fast() -> None:
    slow, fast = (Run(replace(CASES["large-step"], start_seconds=seconds), 0).go() for seconds in (300, 20))
    assert fast.failed < slow.failed / 4


def test_a_cache_that_carries_a_quarter_of_the_batch_gets_the_replicas_that_it_needs() -> None:
    outcome = Run(CASES["kv-carries-8"], 0).go()
    assert outcome.wait(0.95) <= 2
    assert outcome.replica_seconds / CASES["kv-carries-8"].trace.seconds <= 7
