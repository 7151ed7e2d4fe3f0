"""The numbers that gateway, operator and autoscaler derive from a spec alike."""

from typing import Any

import pytest
from tests.api.builders import build_body

from conveyor_api.batching import BatchingMode
from conveyor_api.resource import InferenceService
from conveyor_api.spec import InferenceServiceSpec


def parse_spec(**spec: Any) -> InferenceServiceSpec:
    return InferenceService.parse(build_body(**spec)).spec


def test_mode_none_runs_one_request_whatever_the_batch_size() -> None:
    assert parse_spec(batching={"mode": "None", "maxBatchSize": 64}).batching.effective_batch_size == 1
    assert parse_spec(batching={"maxBatchSize": 64}).batching.effective_batch_size == 64


@pytest.mark.parametrize(("mode", "size", "places"), [("None", 32, 2), ("Static", 4, 5), ("Continuous", 32, 36)])
def test_an_engine_has_places_for_its_batch_and_an_eighth(mode: BatchingMode, size: int, places: int) -> None:
    assert parse_spec(batching={"mode": mode, "maxBatchSize": size}).batching.engine_place_limit == places


@pytest.mark.parametrize(
    ("batching", "seconds"),
    [
        ({"mode": "None"}, 0),
        ({"mode": "Continuous"}, 0),
        ({"mode": "Static"}, 1),
        ({"mode": "Dynamic"}, 0.01),
        ({"mode": "Dynamic", "window": "25ms"}, 0.025),
    ],
)
def test_the_window_is_the_modes_own_unless_said(batching: dict[str, str], seconds: float) -> None:
    assert parse_spec(batching=batching).batching.window_seconds == pytest.approx(seconds)


def test_block_budget_and_memory_fraction_exclude_each_other() -> None:
    assert parse_spec().kv_cache.memory_fraction_value is None
    assert parse_spec(kvCache={"memoryFraction": "0.5"}).kv_cache.memory_fraction_value == 0.5
    budget = parse_spec(kvCache={"blockBudget": 10}).kv_cache
    assert (budget.memory_fraction_value, budget.capacity_tokens) == (None, 160)


@pytest.mark.parametrize(
    ("batching", "autoscaling", "targets"),
    [
        ({}, {}, (25.6, 4)),
        ({"mode": "None"}, {}, (1, 1)),
        ({"maxBatchSize": 4}, {"targetUtilization": 50}, (2, 1)),
        ({}, {"queueDepthTarget": 7}, (25.6, 7)),
    ],
)
def test_targets_follow_the_batch_size(
    batching: dict[str, Any], autoscaling: dict[str, Any], targets: tuple[float, int]
) -> None:
    spec = parse_spec(batching=batching, autoscaling={"maxReplicas": 4, **autoscaling})
    assert (spec.in_flight_target, spec.queue_depth_target) == targets


@pytest.mark.parametrize("autoscaling", [None, {"provider": "None", "maxReplicas": 4}])
def test_fixed_replicas_have_no_targets(autoscaling: dict[str, Any] | None) -> None:
    spec = parse_spec(autoscaling=autoscaling)
    assert not spec.is_autoscaled
    assert (spec.in_flight_target, spec.queue_depth_target) == (None, None)
