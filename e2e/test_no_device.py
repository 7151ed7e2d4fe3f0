"""A service that asks for a GPU, on a node that only pretends to have one: the condition says what to do."""

from typing import Any

from e2e import kube
from e2e.services import service


def test_a_gpu_that_is_not_there_is_a_clear_condition(namespace: str) -> None:
    kube.apply(service("blind", engine={"device": "CUDA"}), namespace)
    found = kube.wait_until("WorkloadReady=False for want of a device", lambda: no_device(namespace), 120)
    assert "no CUDA device is visible" in found["message"]
    assert "set engine.device: Auto" in found["message"]


def no_device(namespace: str) -> dict[str, Any] | None:
    condition = kube.condition(kube.get("infsvc", "blind", namespace), "WorkloadReady")
    return condition if (condition.get("status"), condition.get("reason")) == ("False", "NoDevice") else None
