"""Tests what the operator's metrics expose of each service, also with a real API server and a real process."""

import re
from typing import Any
from unittest.mock import Mock

from tests.operator.builders import make_services
from tests.operator.kubelet import Kubelet, image_pull_failed, ready
from tests.operator.stage import Stage, wait_until
from tests.operator.test_process import Process, process

from conveyor_api.conditions import ABNORMAL, ConditionType
from conveyor_api.errors import InvalidResource, Problem
from conveyor_operator.inferenceservice.kinds import INFERENCE_SERVICE
from conveyor_operator.inferenceservice.series import read_state
from conveyor_operator.kinds import Key
from conveyor_operator.loop.reconcile import Reconciler
from conveyor_operator.loop.store import Store
from conveyor_operator.metrics import Metrics

MOST_SERIES = 11


def make_condition(type: str, reason: str = "Why") -> dict[str, str]:
    return {"type": type, "status": "True", "reason": reason, "message": "", "lastTransitionTime": ""}


def test_a_service_has_a_bounded_number_of_series() -> None:
    conditions = [make_condition(type) for type in ConditionType]
    strange = [make_condition(f"Strange{number}") for number in range(99)] + [make_condition("Ready", "Again")]
    status = {"conditions": [*conditions, *strange], "desiredReplicas": 2, "readyReplicas": 1, "replicas": 4}
    state = read_state({"spec": {"autoscaling": {"maxReplicas": 3}}}, status)
    assert {type for type, _, _ in state.conditions} == set(ConditionType) - ABNORMAL
    assert state.replicas == {"desired": 2, "ready": 1, "maximum": 3}
    assert len(state.conditions) + len(state.replicas) + 1 == MOST_SERIES, "and the time of pods"


def test_what_is_not_known_is_not_exposed() -> None:
    state = read_state({"spec": {}}, {"conditions": [make_condition("Ready", "InvalidSpec")]})
    assert state.conditions == (("Ready", "True", "InvalidSpec"),)
    assert state.replicas == {}


class Absent:
    """A cluster in which no status can be written, because the service does not exist."""

    async def replace_status(self, *_: Any) -> None:
        return None


async def test_a_service_that_is_deleted_during_its_reconcile_is_not_exposed() -> None:
    metrics, store, key = Metrics(), Store(), Key(INFERENCE_SERVICE, "default", "qwen")
    services = make_services(metrics=metrics)
    metadata = {"name": "qwen", "namespace": "default", "uid": "1", "generation": 1, "resourceVersion": "1"}
    for deleted in (False, True):
        store.put(INFERENCE_SERVICE, "1", key, "")
        store.bodies.put(key, {"metadata": metadata, "spec": {}})

        def begin(*_: Any, deleted: bool = deleted) -> None:
            if deleted:
                store.drop(INFERENCE_SERVICE, "1")
                metrics.drop_service("default", "qwen")
            raise InvalidResource((Problem("spec", "is wrong"),))

        services.begin = begin  # type: ignore[method-assign, assignment]
        await Reconciler([services], Absent(), store).reconcile(key)  # type: ignore[arg-type]
        assert [bool(family.samples) for family in metrics.services.collect()] == [not deleted, False]


async def test_the_body_of_a_service_that_is_deleted_while_its_status_is_written_is_not_kept() -> None:
    store, key = Store(), Key(INFERENCE_SERVICE, "default", "qwen")
    metadata = {"name": "qwen", "namespace": "default", "uid": "1", "generation": 1, "resourceVersion": "1"}
    body = {"apiVersion": "conveyor.dev/v1alpha1", "kind": "InferenceService", "metadata": metadata, "spec": {}}
    store.put(INFERENCE_SERVICE, "1", key, "")
    store.bodies.put(key, body)

    class Deleting:
        async def replace_status(self, *_: Any) -> Any:
            store.drop(INFERENCE_SERVICE, "1")
            return body | {"metadata": metadata | {"resourceVersion": "2"}}

        async def create(self, *_: Any) -> None: ...

    services = make_services()
    services.begin = Mock(side_effect=InvalidResource((Problem("spec", "is wrong"),)))  # type: ignore[method-assign]
    await Reconciler([services], Deleting(), store).reconcile(key)  # type: ignore[arg-type]
    assert store.bodies.get("1") is None


def series(running: Process, name: str = "qwen") -> dict[str, Any]:
    """Return the series of a service: status and reason by condition, numbers of replicas, and the time of pods."""
    found: dict[str, Any] = {}
    lines = [line for line in running.get("/metrics")[1].splitlines() if f'inference_service="{name}"' in line]
    for line in lines:
        labels, value = dict(re.findall(r'(\w+)="([^"]*)"', line)), float(line.rpartition(" ")[2])
        if line.startswith("conveyor_operator_condition"):
            assert value == 1
            assert labels["type"] not in found, "one series for each condition"
            found[labels["type"]] = (labels["status"], labels["reason"])
        elif line.startswith("conveyor_operator_replicas"):
            found[labels["of"]] = value
        else:
            assert line.startswith("conveyor_operator_pod_seconds_total")
            found["pod seconds"] = value
    assert len(found) == len(lines) <= MOST_SERIES
    return found


def wait_series(running: Process, name: str = "qwen", **expected: Any) -> dict[str, Any]:
    wait_until(
        f"{name} is exposed with {expected}", lambda: series(running, name).items() >= expected.items(), 60,
        lambda: series(running, name),
    )  # fmt: skip
    return series(running, name)


def test_a_service_s_state_is_exposed_until_it_is_deleted(stage: Stage) -> None:
    space = stage.space
    with process(stage) as operator, Kubelet(space, ready) as kubelet:
        space.make_service(model={"uri": "hf://example/model"}, autoscaling={"minReplicas": 1, "maxReplicas": 3})
        found = wait_series(operator, Ready=("True", "Ready"), Progressing=("False", "UpToDate"), ready=1)
        assert (found["desired"], found["maximum"]) == (1, 3)
        assert found.keys() >= set(ConditionType) - ABNORMAL
        kubelet.decide = lambda pod: image_pull_failed(pod) if "none:1" in str(pod["spec"]) else ready(pod)
        space.edit("qwen", engine={"image": "example/none:1"})
        wait_series(operator, Ready=("True", "ImagePullFailed"), Progressing=("False", "ImagePullFailed"))
        space.edit("qwen", autoscaling=None, replicas=0)
        found = wait_series(operator, Ready=("True", "ScaledToZero"), desired=0, ready=0)
        assert "maximum" not in found
        space.delete("InferenceService", "qwen")
        wait_until("its series are gone", lambda: not series(operator), 60, lambda: series(operator))


def test_a_service_that_never_had_a_child_is_exposed_until_it_is_deleted(stage: Stage) -> None:
    """No event of a child leads to a reconcile after the deletion."""
    with process(stage) as operator:
        stage.space.make_service("wrong", profile="none")
        wait_series(operator, "wrong", Ready=("False", "InvalidSpec"), Progressing=("False", "InvalidSpec"))
        stage.space.delete("InferenceService", "wrong")
        wait_until("its series are gone", lambda: not series(operator, "wrong"), 60)


def test_a_new_operator_exposes_services_whose_status_is_written_already(stage: Stage) -> None:
    with Kubelet(stage.space, ready):
        with process(stage) as first:
            stage.space.make_service()
            before = wait_series(first, Ready=("True", "Ready"), Progressing=("False", "UpToDate"), ready=1)
        with process(stage) as second:
            assert wait_series(second, **before) == before
