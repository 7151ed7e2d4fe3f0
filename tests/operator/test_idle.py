"""Tests that an operator with nothing to do makes no calls except watches, and a busy one only necessary calls."""

from tests.operator.kubelet import Kubelet, ready
from tests.operator.stage import Stage, wait_until

AUTOSCALING = {"minReplicas": 1, "maxReplicas": 5}


def calls_but_watches(stage: Stage) -> list[str]:
    return [f"{c.verb} {c.resource}/{c.name}" for c in stage.proxy.calls if c.verb != "watch"]


def make_two_services(stage: Stage) -> None:
    for number in range(2):
        stage.space.make_service(f"qwen-{number}")
        stage.space.wait_condition(f"qwen-{number}", "Ready", "True", "Ready", 60)


def test_an_idle_operator_makes_no_calls(stage: Stage) -> None:
    with stage.operator(), Kubelet(stage.space, ready):
        make_two_services(stage)
        stage.proxy.wait_quiet(4)  # raises TimeoutError otherwise


def test_the_hpas_looks_cost_no_applies(stage: Stage) -> None:
    with stage.operator(), Kubelet(stage.space, ready):
        stage.space.make_service(autoscaling=AUTOSCALING)
        wait_until("the HPA", lambda: stage.space.get("HorizontalPodAutoscaler", "qwen-engine"))
        stage.space.wait_condition("qwen", "Ready", "True", "Ready", 60)
        stage.space.wait_condition("qwen", "ScalingReady", "False", "MetricsUnavailable")
        stage.proxy.wait_quiet(1)
        before = calls_but_watches(stage)
        for second in range(4):  # what its controller does
            status = {"lastScaleTime": f"2026-11-21T08:00:0{second}Z"}
            stage.space.patch("HorizontalPodAutoscaler", "qwen-engine", {"status": status}, "status")
            stage.proxy.wait_quiet(0.2)
        stage.proxy.wait_quiet(1)
        assert [c for c in calls_but_watches(stage)[len(before) :] if c.startswith("patch")] == []


def test_a_new_service_costs_a_call_a_child(stage: Stage) -> None:
    with stage.operator():
        stage.proxy.wait_quiet()
        before = len(stage.proxy.calls)
        stage.space.make_service()
        stage.space.wait_children("qwen")
        stage.proxy.wait_quiet()
    # Those without a namespace are Kopf's, which looks at what the API server has when the operator starts.
    calls = [c for c in stage.proxy.calls[before:] if c.verb in ("get", "patch") and c.namespace]
    children = [c for c in calls if c.resource != "inferenceservices"]
    assert [c.resource for c in children if c.verb == "get"] == ["deployments", "persistentvolumeclaims"]
    assert len(children) == 2 + 7, "a look at the Deployment and at the model's claim, and an apply of each"
    statuses = [c for c in calls if c.resource == "inferenceservices" and c.verb == "patch"]
    assert len(statuses) <= 3
