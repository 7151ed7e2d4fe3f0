"""Tests that no pod is lost when the replicas are handed over between operator and HPA on a real API server."""

import http.client
import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.operator.killer import live_write_by_write
from tests.operator.kubelet import Kubelet, ready
from tests.operator.stage import Json, Stage, wait_until

AUTOSCALING = {"minReplicas": 1, "maxReplicas": 5}


@contextmanager
def watching_replicas(stage: Stage) -> Iterator[list[int]]:
    """Collect every value of the Deployment's replicas, from watches without a gap."""
    seen: list[int] = []
    stop = threading.Event()
    deployment = stage.space.need("Deployment", "qwen-engine")
    version = deployment["metadata"]["resourceVersion"]

    def follow(version: str) -> None:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        while not stop.is_set():
            query = f"?watch=true&timeoutSeconds=1&resourceVersion={version}"
            url = f"http://127.0.0.1:{stage.proxy.port}{stage.space.path('Deployment')}{query}"
            try:
                with opener.open(url, timeout=30) as response:
                    for line in response:
                        body = json.loads(line)["object"]
                        version = body["metadata"]["resourceVersion"]
                        seen.append(int(body["spec"]["replicas"]))
            except (OSError, http.client.HTTPException, json.JSONDecodeError):
                time.sleep(0.05)  # cut with the operator: it goes on after the last version

    thread = threading.Thread(target=follow, args=(version,), daemon=True)
    thread.start()
    yield seen
    stop.set()
    thread.join(10)
    assert not thread.is_alive()


def replicas(stage: Stage) -> int:
    return int(stage.space.need("Deployment", "qwen-engine")["spec"]["replicas"])


def managers_of_replicas(stage: Stage) -> set[str]:
    entries = stage.space.need("Deployment", "qwen-engine")["metadata"]["managedFields"]
    return {e["manager"] for e in entries if "f:replicas" in e["fieldsV1"].get("f:spec", {})}


def scale_as_the_hpa(stage: Stage, count: int) -> None:
    path = stage.space.path("Deployment", "qwen-engine", "scale") + "?fieldManager=kube-controller-manager"
    stage.space.api.call("PATCH", path, {"spec": {"replicas": count}}, "application/merge-patch+json")


def hpa(stage: Stage) -> Json | None:
    return stage.space.get("HorizontalPodAutoscaler", "qwen-engine")


def test_from_fixed_to_autoscaled_and_back_no_pod_is_dropped(stage: Stage) -> None:
    with stage.operator():
        stage.space.make_service(replicas=3)
        stage.space.wait_children("qwen")
        stage.proxy.wait_quiet()
        with watching_replicas(stage) as seen:
            switch_there_and_back(stage)
    assert set(seen) == {3, 5}


def switch_there_and_back(stage: Stage) -> None:
    stage.space.edit("qwen", replicas=None, autoscaling=AUTOSCALING)
    wait_until("the HPA", lambda: hpa(stage))
    stage.proxy.wait_quiet()
    assert replicas(stage) == 3
    assert "conveyor" not in managers_of_replicas(stage)
    scale_as_the_hpa(stage, 5)
    stage.proxy.wait_quiet()
    assert replicas(stage) == 5
    assert managers_of_replicas(stage) == {"kube-controller-manager"}
    before = len(stage.proxy.writes())
    stage.space.edit("qwen", autoscaling=None)
    wait_until("no HPA", lambda: hpa(stage) is None)
    stage.proxy.wait_quiet()
    order = [(call.verb, call.resource) for call in stage.proxy.writes()[before:]]
    assert order.index(("delete", "horizontalpodautoscalers")) < order.index(("patch", "deployments"))
    assert replicas(stage) == 5, "the live number is held"
    assert "conveyor" in managers_of_replicas(stage)
    assert "keeps its 5 replicas" in stage.space.condition("qwen", "ScalingReady")["message"]


@pytest.mark.slow
def test_a_deployment_that_somebody_deletes_comes_back_with_the_number_that_it_had(stage: Stage) -> None:
    with stage.operator(), Kubelet(stage.space, ready):
        stage.space.make_service(autoscaling=AUTOSCALING)
        wait_until("an HPA", lambda: hpa(stage))
        scale_as_the_hpa(stage, 4)
        wait_until("it is told", lambda: stage.space.wait_observed("qwen")["status"]["desiredReplicas"] == 4)
        former = stage.space.need("Deployment", "qwen-engine")["metadata"]["uid"]
        stage.space.delete("Deployment", "qwen-engine")
        wait_until("another one", lambda: uid_of_deployment(stage) not in ("", former))
        wait_until("its former number, not the one to start with", lambda: replicas(stage) == 4)


def uid_of_deployment(stage: Stage) -> str:
    return str(((stage.space.get("Deployment", "qwen-engine") or {}).get("metadata") or {}).get("uid", ""))


@pytest.mark.slow
def test_operators_that_die_in_between_drop_no_pod_either(stage: Stage) -> None:
    """Each operator lives for one write, in both directions. On the way back a cache is removed too."""
    cache = {"uri": "hf://example/model", "cache": {"strategy": "PVC", "size": "10Gi"}}
    with Kubelet(stage.space, ready):
        with stage.operator():
            stage.space.make_service(replicas=2, model=cache)
            stage.space.wait_children("qwen")
            stage.proxy.wait_quiet()
        with watching_replicas(stage) as seen:
            stage.space.edit("qwen", replicas=None, autoscaling=AUTOSCALING)
            live_write_by_write(stage, after=False)
            assert hpa(stage)
            scale_as_the_hpa(stage, 4)
            stage.space.edit("qwen", autoscaling=None, model={"cache": None})
            live_write_by_write(stage, after=True)
            assert hpa(stage) is None
            claim = stage.space.get("PersistentVolumeClaim", "qwen-models")
            assert claim is None or "deletionTimestamp" in claim["metadata"]
    assert set(seen) == {2, 4}
    assert "conveyor" in managers_of_replicas(stage)


def test_the_hpas_last_number_is_held_although_no_watch_has_reported_it(stage: Stage) -> None:
    with stage.operator():
        stage.space.make_service(autoscaling=AUTOSCALING)
        wait_until("the HPA", lambda: hpa(stage))
        stage.proxy.wait_quiet()
        deaf = stage.proxy.fail(lambda call: (call.verb, call.resource) == ("watch", "deployments"), 0, times=10**6)
        stage.proxy.sever()
        stage.proxy.severed = False
        wait_until("no word of Deployments", lambda: deaf.hits)
        scale_as_the_hpa(stage, 4)
        stage.space.edit("qwen", autoscaling=None)
        wait_until("no HPA", lambda: hpa(stage) is None)
        stage.proxy.wait_quiet()
        assert replicas(stage) == 4
        deaf.times = 0


def test_a_held_number_goes_when_the_spec_names_another(stage: Stage) -> None:
    with stage.operator():
        stage.space.make_service(autoscaling=AUTOSCALING)
        wait_until("the HPA", lambda: hpa(stage))
        scale_as_the_hpa(stage, 4)
        stage.space.edit("qwen", autoscaling=None)
        wait_until("no HPA", lambda: hpa(stage) is None)
        stage.proxy.wait_quiet()
        assert replicas(stage) == 4
        stage.space.edit("qwen", replicas=2)
        wait_until("two replicas", lambda: replicas(stage) == 2)
        wait_until("no note", lambda: "kept" not in stage.space.condition("qwen", "ScalingReady")["message"])


def test_an_autoscaled_service_starts_with_the_autoscalers_fewest(stage: Stage) -> None:
    with stage.operator():
        stage.space.make_service(autoscaling=AUTOSCALING | {"minReplicas": 3})
        wait_until("the HPA", lambda: hpa(stage))
        stage.proxy.wait_quiet()
        assert replicas(stage) == 3
        assert managers_of_replicas(stage) == {"conveyor-replicas"}


def test_an_autoscaler_starts_from_one_when_there_were_none(stage: Stage) -> None:
    with stage.operator():
        stage.space.make_service(replicas=0)
        stage.space.wait_children("qwen")
        stage.space.wait_condition("qwen", "Ready", "True", "ScaledToZero")
        stage.space.edit("qwen", replicas=None, autoscaling=AUTOSCALING)
        wait_until("the HPA", lambda: hpa(stage))
        wait_until("one replica", lambda: replicas(stage) == 1)


@pytest.mark.slow
def test_the_hpas_number_is_never_touched(stage: Stage) -> None:
    with stage.operator(), Kubelet(stage.space, ready):
        stage.space.make_service(autoscaling=AUTOSCALING)
        wait_until("the HPA", lambda: hpa(stage))
        for count in (4, 2):
            scale_as_the_hpa(stage, count)
            stage.space.edit("qwen", drain={"timeout": f"{count}s"})  # the Deployment is applied all the same
            stage.proxy.wait_quiet()
            assert replicas(stage) == count


def test_fixed_replicas_that_somebody_changes_are_changed_back(stage: Stage) -> None:
    with stage.operator():
        stage.space.make_service(replicas=2)
        stage.space.wait_children("qwen")
        stage.proxy.wait_quiet()
        stage.space.patch("Deployment", "qwen-engine", {"spec": {"replicas": 4}}, "scale")
        wait_until("two replicas", lambda: replicas(stage) == 2)


def test_scaling_the_resource_scales_the_pods(stage: Stage) -> None:
    with stage.operator():
        stage.space.make_service(replicas=1)
        stage.space.wait_children("qwen")
        stage.space.patch("InferenceService", "qwen", {"spec": {"replicas": 3}}, "scale")
        wait_until("three replicas", lambda: replicas(stage) == 3)


def test_a_number_that_somebody_elses_autoscaler_set_is_left_and_kept(stage: Stage) -> None:
    with stage.operator():
        stage.space.make_service(autoscaling={"provider": "External", "maxReplicas": 5})
        stage.space.wait_condition("qwen", "ScalingReady", "True", "ExternalAutoscaler")
        stage.space.patch("Deployment", "qwen-engine", {"spec": {"replicas": 4}}, "scale")
        stage.space.edit("qwen", drain={"timeout": "3s"})  # the Deployment is applied all the same
        stage.proxy.wait_quiet()
        assert replicas(stage) == 4
        stage.space.edit("qwen", autoscaling=None)
        stage.space.wait_condition("qwen", "ScalingReady", "True", "FixedReplicas")
        assert replicas(stage) == 4
        assert "keeps its 4 replicas" in stage.space.condition("qwen", "ScalingReady")["message"]
