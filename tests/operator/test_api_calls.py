"""The operator's rights: every call that it makes in a whole life, compared with the list that its role is made from.

`api_calls.jsonl` is what the chart's role must allow, no more and no less. A line too many here means a right to take
away there. To write it anew after a change on purpose: CONVEYOR_WRITE_API_CALLS=1.
"""

import json
import os
from pathlib import Path

from tests.operator.api_proxy import Call
from tests.operator.kubelet import Kubelet, ready
from tests.operator.stage import Stage, wait_until
from tests.operator.test_apiservice import PATH, SECRET, make_api_services

LIST = Path(__file__).parent / "api_calls.jsonl"
API_SERVICES = ("v1beta2.custom.metrics.k8s.io", "v1beta1.custom.metrics.k8s.io")


def test_the_operator_makes_the_calls_of_its_role_and_no_others(stage: Stage) -> None:
    live_a_whole_life(stage)
    made = {call.permission for call in stage.proxy.calls if not call.resource.startswith("/")}
    lines = [dict(zip(("verb", "group", "resource", "subresource"), call, strict=True)) for call in sorted(made)]
    if os.environ.get("CONVEYOR_WRITE_API_CALLS"):
        LIST.write_text("".join(json.dumps(line) + "\n" for line in lines))
    expected = [json.loads(line) for line in LIST.read_text().splitlines()]
    assert lines == expected


def test_objects_of_the_chart_are_only_touched_by_name(stage: Stage) -> None:
    """So that the role may name them."""
    live_a_whole_life(stage)
    touched = [call for call in stage.proxy.calls if call.resource in ("secrets", "apiservices")]
    assert {call.name for call in touched if call.is_write} == {SECRET, *API_SERVICES}
    assert {call.verb for call in touched} == {"list", "watch", "patch"}
    assert all(call.selected for call in touched if call.verb in ("list", "watch"))


def live_a_whole_life(stage: Stage) -> None:
    """Everything that the operator knows to do, once."""
    space = stage.space
    space.create("Secret", {"metadata": {"name": SECRET}, "type": "Opaque"})
    make_api_services(space, {"name": "conveyor-metrics", "namespace": space.namespace, "port": 1})
    model = {"uri": "hf://example/model", "cache": {"strategy": "PVC", "size": "1Gi"}}
    try:
        with stage.operator(metrics_api=True, system_namespace=space.namespace), Kubelet(space, ready):
            space.make_service(replicas=2, model=model)
            space.wait_condition("qwen", "Ready", "True", "Ready", 60)
            space.edit("qwen", autoscaling={"maxReplicas": 3})
            wait_until("the HPA", lambda: space.get("HorizontalPodAutoscaler", "qwen-engine"))
            space.edit("qwen", autoscaling=None, batching={"maxBatchSize": 4}, model={"cache": None})
            wait_until("no HPA", lambda: space.get("HorizontalPodAutoscaler", "qwen-engine") is None)
            wait_until("no claim", lambda: deleted(stage, "persistentvolumeclaims"))
            wait_until("no old ConfigMap", lambda: deleted(stage, "configmaps"))
            wait_until("a certificate", lambda: wrote(stage, "secrets") and wrote(stage, "apiservices"))
            stage.proxy.wait_quiet()
    finally:
        for name in API_SERVICES:
            space.api.delete(f"{PATH}/{name}")


def deleted(stage: Stage, resource: str) -> list[Call]:
    return [call for call in stage.proxy.calls if (call.verb, call.resource) == ("delete", resource)]


def wrote(stage: Stage, resource: str) -> list[Call]:
    return [call for call in stage.proxy.calls if call.is_write and call.resource == resource]
