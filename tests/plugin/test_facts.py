"""What is read for `explain`, of answers that a real cluster gives only for a moment."""

from typing import Any

from conveyor_api import names
from conveyor_kubectl.facts import read_facts

QUEUE = {"type": "Object", "object": {"metric": {"name": "inference_queue_depth"}, "target": {"averageValue": "4"}}}
CPU = {"type": "Resource", "resource": {"name": "cpu"}}


class Answers:
    """As `cluster.Cluster`: a service, its HorizontalPodAutoscaler, and 7 for every metric."""

    def find(self, path: str) -> Any:
        if "inferenceservices" not in path:
            return None
        return {"metadata": {"name": "qwen", "namespace": "a"}, "spec": {"model": {"uri": "pvc://models/qwen"}}}

    def get(self, path: str, query: object = None) -> Any:
        if "custom.metrics" in path:
            return {"items": [{"value": "7"}]}
        metadata = {"name": names.engine_name("qwen"), "ownerReferences": [{"kind": names.KIND}]}
        return {"items": [{"metadata": metadata, "spec": {"maxReplicas": 2, "metrics": [CPU, QUEUE]}}]}


def test_a_metric_that_somebody_added_is_not_asked_for() -> None:
    facts = read_facts(Answers(), "a", "qwen")  # type: ignore[arg-type]
    assert facts.values == {"inference_queue_depth": 7}
