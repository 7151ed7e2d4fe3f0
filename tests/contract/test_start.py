"""Tests the parts of a start. A real operator learns a real engine's warm-up time through a real gateway."""

import json
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest
from tests.engine.chat_model import write_chat_model
from tests.engine.processes import IDLE, EngineServer
from tests.gateway.cluster import make_endpoint, make_slice, own_address
from tests.gateway.process import GatewayProcess
from tests.operator import kubelet
from tests.operator.kubelet import Kubelet
from tests.operator.stage import Space, Stage, wait_until

Json = dict[str, Any]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    model = write_chat_model(tmp_path_factory.mktemp("models") / "tiny")
    with EngineServer(tmp_path_factory.mktemp("engine"), model, IDLE, host="0.0.0.0") as started:
        yield started.wait_ready()


@pytest.fixture
def stage(stage: Stage) -> Iterator[Stage]:
    with Kubelet(stage.space, ready_in_25_seconds, addresses=False):
        yield stage


def ready_in_25_seconds(pod: Json) -> Json:
    """Return the status of a pod that was ready after 25 seconds, of which the fetch took 4."""

    def after(seconds: int) -> str:
        moment = datetime.fromisoformat(pod["metadata"]["creationTimestamp"]) + timedelta(seconds=seconds)
        return moment.strftime("%Y-%m-%dT%H:%M:%SZ")

    status = kubelet.ready(pod)
    for condition in status["conditions"]:
        condition["lastTransitionTime"] = after(0 if condition["type"] == "PodScheduled" else 25)
    status["initContainerStatuses"][0]["state"]["terminated"] |= {"startedAt": after(1), "finishedAt": after(5)}
    return status


def last_start(space: Space) -> Json:
    status = space.need("InferenceService", "qwen").get("status") or {}
    return dict(status.get("lastStart") or {})


def publish_engine(space: Space, engine: EngineServer) -> str:
    """Publish the engine as the only pod's, so that the gateways learn of it now. Returns the pod's uid."""
    (pod,) = space.list("Pod")
    uid = str(pod["metadata"]["uid"])
    endpoint = make_endpoint(own_address()) | {
        "targetRef": {"kind": "Pod", "name": pod["metadata"]["name"], "uid": uid}
    }
    slice_ = make_slice("qwen-1", space.namespace, "qwen", int(engine.url.rpartition(":")[2]), endpoint)
    space.apply("EndpointSlice", slice_)
    return uid


def is_whole(start: Json) -> bool:
    """Return whether the warm-up is reported and no longer counted as part of the load."""
    parts = [int(start.get(part, "0s").removesuffix("s")) for part in ("schedule", "image", "model", "load", "warmUp")]
    return "warmUp" in start and sum(parts) == 25


@pytest.mark.slow
def test_the_status_is_completed_when_the_gateways_have_learned_of_the_engine(
    stage: Stage, gateway: GatewayProcess, engine: EngineServer
) -> None:
    space = stage.space
    with stage.operator():
        space.make_service()
        wait_until("the start is told", lambda: last_start(space).get("load") == "20s")
        uid = publish_engine(space, engine)
        wait_until("its warm-up is", lambda: is_whole(last_start(space)), show=lambda: last_start(space))
        stage.proxy.wait_quiet(2)
    start = gateway.admin(f"/start?service={space.namespace}/qwen&pod={uid}")
    seconds = engine.metric("conveyor_engine_start_seconds", part="warm_up")
    assert (start[0], json.loads(start[1])) == (200, {"warm_up_seconds": seconds})
    assert last_start(space)["warmUp"] == f"{seconds:.0f}s"


@pytest.mark.slow
def test_an_operator_that_restarts_completes_what_the_former_one_could_not(stage: Stage, engine: EngineServer) -> None:
    space = stage.space
    with stage.operator():
        space.make_service()
        wait_until("the start is told", lambda: last_start(space).get("load") == "20s")
    publish_engine(space, engine)
    assert "warmUp" not in last_start(space)
    with stage.operator():
        wait_until("its warm-up is", lambda: is_whole(last_start(space)), show=lambda: last_start(space))
