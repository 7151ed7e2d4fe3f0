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


@pytest.mark.parametrize(
    ("spec", "size"),
    [
        ({}, 256),
        ({"task": "Generate"}, 256),
        ({"engine": {"device": "Auto"}}, 32),
        ({"task": "Embed"}, 32),
        ({"task": "Transcribe"}, 32),
        ({"runtime": "VLLM", "engine": {"image": "vllm:1"}}, 32),
        ({"batching": {"maxBatchTokens": 8}}, 8),
        ({"batching": {"maxBatchSize": 40}}, 40),
        ({"batching": {"mode": "None"}}, 1),
    ],
    ids=str,
)
def test_a_batch_size_that_is_left_open_follows_device_and_task(spec: dict[str, Any], size: int) -> None:
    service = InferenceService.parse(build_body(**spec))
    assert service.batching.effective_batch_size == service.settled_spec.batching.effective_batch_size == size


def test_a_model_that_turns_out_to_embed_has_the_smaller_batch() -> None:
    body = build_body()
    body["status"] = {"model": {"uri": body["spec"]["model"]["uri"], "task": "Embed"}}
    assert InferenceService.parse(body).batching.effective_batch_size == 32


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


def test_block_budget_and_memory_per_cent_exclude_each_other() -> None:
    assert parse_spec().kv_cache.memory_fraction is None
    assert parse_spec(kvCache={"memoryPercent": 50}).kv_cache.memory_fraction == 0.5
    budget = parse_spec(kvCache={"blockBudget": 10}).kv_cache
    assert (budget.memory_fraction, budget.capacity_tokens) == (None, 160)


@pytest.mark.parametrize(
    ("batching", "autoscaling", "targets"),
    [
        ({}, {}, (24, 4)),
        ({"mode": "None"}, {}, (1, 1)),
        ({"maxBatchSize": 4}, {"targetUtilizationPercent": 50}, (2, 1)),
        ({}, {"queueDepthPerReplica": 7}, (24, 7)),
    ],
)
def test_targets_follow_the_batch_size(
    batching: dict[str, Any], autoscaling: dict[str, Any], targets: tuple[float, int]
) -> None:
    spec = parse_spec(batching=batching, autoscaling={"maxReplicas": 4, **autoscaling})
    assert (spec.in_flight_target, spec.queue_depth_target) == targets


def test_fixed_replicas_have_no_targets() -> None:
    spec = parse_spec()
    assert (spec.in_flight_target, spec.queue_depth_target) == (None, None)


@pytest.mark.parametrize(
    ("spec", "first", "most"),
    [({}, 1, 1), ({"replicas": 0}, 0, 0), ({"replicas": 3}, 3, 3), ({"autoscaling": {"maxReplicas": 4}}, 1, 4)],
)
def test_a_service_begins_with_its_replicas_or_the_autoscalers_fewest(spec: Any, first: int, most: int) -> None:
    parsed = parse_spec(**spec)
    assert (parsed.first_replicas, parsed.most_replicas) == (first, most)


def test_times_are_seconds() -> None:
    spec = parse_spec(queue={"timeout": "1m30s"}, requestTimeout="1h", drain={"timeout": "0s"})
    assert (spec.queue.timeout_seconds, spec.request_timeout_seconds, spec.drain.timeout_seconds) == (90, 3600, 0)
