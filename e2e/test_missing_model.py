"""A model that is not there: the condition says so, and a corrected uri makes the service Ready."""

from e2e import kube
from e2e.services import service


def test_a_missing_model_is_a_clear_condition_and_can_be_fixed(namespace: str) -> None:
    kube.apply(service("lost", model={"uri": "pvc://models/nowhere"}), namespace)
    found = kube.wait_until("Ready=False", lambda: model_missing(namespace))
    assert found["reason"] == "ModelNotFound"
    assert "nowhere" in found["message"]
    kube.apply(service("lost"), namespace)
    kube.wait_ready("lost", namespace)


def model_missing(namespace: str) -> dict | None:
    condition = kube.condition(kube.get("infsvc", "lost", namespace), "Ready")
    return condition if condition.get("status") == "False" and condition.get("reason") == "ModelNotFound" else None
