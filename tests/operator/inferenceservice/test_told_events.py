"""Tests the Events on a real API server: one for each thing that happened, in order."""

from pathlib import Path

import pytest
from tests.kubectl import kubectl
from tests.operator import kubelet
from tests.operator.kubelet import Json, Kubelet
from tests.operator.stage import Stage, wait_until

AUTOSCALING = {"minReplicas": 1, "maxReplicas": 5}


def events(stage: Stage) -> list[tuple[str, str]]:
    """Return (type, reason) of the operator's Events, in order."""
    return [(event["type"], event["reason"]) for event in our_events(stage)]


def our_events(stage: Stage) -> list[Json]:
    ours = [e for e in stage.space.list("Event") if e["source"].get("component") == "conveyor.dev/operator"]
    return sorted(ours, key=lambda event: str(event["eventTime"]))


@pytest.mark.slow
def test_events_come_with_transitions_only(stage: Stage) -> None:
    with stage.operator(), Kubelet(stage.space, kubelet.oom_killed) as node:
        stage.space.make_service()
        stage.space.wait_condition("qwen", "Ready", "False", "OOMKilled")
        stage.proxy.wait_quiet()
        before = events(stage)
        for number in range(3):  # it crashes again and again
            node.decide = lambda pod, number=number: crashed_at(pod, f"2026-11-21T08:00:1{number}Z")
            wait_until("it is seen", lambda number=number: last_failure_time(stage).endswith(f"1{number}Z"))
        stage.proxy.wait_quiet(2)
        assert events(stage) == before
        assert len(before) == len(set(before))


def crashed_at(pod: Json, time: str) -> Json:
    status = kubelet.oom_killed(pod)
    status["containerStatuses"][0]["lastState"]["terminated"]["finishedAt"] = time
    return status


def last_failure_time(stage: Stage) -> str:
    return str(stage.space.need("InferenceService", "qwen")["status"]["lastFailure"]["time"])


@pytest.mark.slow
def test_scaling_by_the_autoscaler_is_one_event_a_decision_and_a_reading_is_no_write(stage: Stage) -> None:
    """The test plays the HPA's controller.

    The real one finds no metrics here, and the test's status keeps it from acting.
    """
    with stage.operator(), Kubelet(stage.space, kubelet.ready):
        stage.space.make_service(autoscaling=AUTOSCALING)
        stage.space.wait_condition("qwen", "Ready", "True", "Ready")
        stage.space.wait_condition("qwen", "ScalingReady", "False", "MetricsUnavailable")
        stage.proxy.wait_quiet()
        before = events(stage)
        for replicas in (3, 1):
            now = stage.space.need("Deployment", "qwen-engine")["spec"]["replicas"]
            stage.space.patch("Deployment", "qwen-engine", {"spec": {"replicas": replicas}}, "scale")
            play_decision(stage, now, replicas)
            wait_until("it is told", lambda desired=replicas: scaled_to(stage) == desired)
            wait_until("the pods", lambda desired=replicas: deployment_is(stage, desired))
        # Events are written after the status, which may take longer than the proxy's quiet on a busy machine.
        wait_until("both events", lambda: [each["reason"] for each in our_events(stage)].count("Scaled") >= 2)
        stage.proxy.wait_quiet()
        new_events = our_events(stage)[len(before) :]
        assert [event["reason"] for event in new_events if not event["reason"].startswith(("Scaling", "Metrics"))] == [
            "Scaled",
            "Scaled",
        ]
        assert stage.space.condition("qwen", "Progressing")["reason"] == "UpToDate"


def scaled_to(stage: Stage) -> int:
    return int(stage.space.need("InferenceService", "qwen")["status"]["autoscaling"].get("desiredReplicas", 0))


def deployment_is(stage: Stage, replicas: int) -> bool:
    status = stage.space.need("Deployment", "qwen-engine")["status"]
    return bool(status.get("replicas") == status.get("readyReplicas") == replicas)


def play_decision(stage: Stage, now: int, replicas: int) -> None:
    metric = {
        "metric": {"name": "inference_queue_depth"},
        "current": {"averageValue": str(12 if replicas > now else 0)},
    }
    described = {"apiVersion": "conveyor.dev/v1alpha1", "kind": "InferenceService", "name": "qwen"}
    status = {
        "currentReplicas": now,
        "desiredReplicas": replicas,
        "currentMetrics": [{"type": "Object", "object": {**metric, "describedObject": described}}],
    }
    stage.space.patch("HorizontalPodAutoscaler", "qwen-engine", {"status": status}, "status")


@pytest.mark.slow
def test_kubectl_describe_reports_the_events_in_the_order_in_which_they_happened(
    stage: Stage, kubeconfig: Path
) -> None:
    with stage.operator(), Kubelet(stage.space, kubelet.oom_killed) as node:
        stage.space.make_service()
        stage.space.wait_condition("qwen", "Ready", "False", "OOMKilled")
        for play, reason in [(kubelet.ready, "Ready"), (kubelet.oom_killed, "OOMKilled")] * 7:
            node.decide = play
            wait_until("it turns", lambda reason=reason: stage.space.condition("qwen", "Ready")["reason"] == reason)
        stage.proxy.wait_quiet()
        described = kubectl(kubeconfig, stage.space.namespace, "describe", "infsvc/qwen")
    rows = [line.split() for line in described.partition("Events:")[2].splitlines()]
    listed = [(row[0], row[1]) for row in rows if row and row[0] in ("Normal", "Warning")]
    assert listed == events(stage)
    assert len(listed) > 12, "fewer are sorted by chance"


def test_a_hand_edit_that_is_undone_names_what_to_change_instead(stage: Stage) -> None:
    with stage.operator(), Kubelet(stage.space, kubelet.ready):
        stage.space.make_service(autoscaling=AUTOSCALING)
        stage.space.wait_condition("qwen", "Ready", "True", "Ready")
        stage.proxy.wait_quiet()
        labels = {"metadata": {"labels": {"somebody": "else"}}}
        stage.space.patch("HorizontalPodAutoscaler", "qwen-engine", labels)
        stage.proxy.wait_quiet()
        assert "Restored" not in dict(map(reversed, events(stage))), "what others add stays"
        for _ in range(3):
            stage.space.patch("HorizontalPodAutoscaler", "qwen-engine", {"spec": {"maxReplicas": 50}})
            wait_until("it is undone", lambda: max_replicas(stage) == 5)
        stage.space.delete("PodDisruptionBudget", "qwen-engine")
        wait_until("it is back", lambda: stage.space.get("PodDisruptionBudget", "qwen-engine"))
        wait_until("both are told", lambda: len(restored(stage)) == 2)
        stage.proxy.wait_quiet()
    assert restored(stage) == [
        "someone edited HorizontalPodAutoscaler qwen-engine, and Conveyor restored it; "
        "change spec.autoscaling of the InferenceService instead",
        "someone deleted PodDisruptionBudget qwen-engine, and Conveyor restored it; "
        "change the spec of the InferenceService instead",
    ]


def restored(stage: Stage) -> list[str]:
    return [event["message"] for event in our_events(stage) if event["reason"] == "Restored"]


def max_replicas(stage: Stage) -> int:
    return int(stage.space.need("HorizontalPodAutoscaler", "qwen-engine")["spec"]["maxReplicas"])
