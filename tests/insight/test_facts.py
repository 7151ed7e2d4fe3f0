"""What is read for `explain`, of answers that a real cluster gives only for a moment."""

from typing import Any

from conveyor_api import names
from conveyor_insight.facts import read_facts

QUEUE = {"type": "Object", "object": {"metric": {"name": "inference_queue_depth"}, "target": {"averageValue": "4"}}}
CPU = {"type": "Resource", "resource": {"name": "cpu"}}


OF_KEDA = {"matchLabels": {"scaledobject.keda.sh/name": "qwen-engine"}}
EXTERNAL = {
    "type": "External",
    "external": {
        "metric": {"name": "s1-metric-api-inference_queue_depth", "selector": OF_KEDA},
        "target": {"averageValue": "4"},
    },
}


class Answers:
    """As `cluster.Cluster`: a service, its HorizontalPodAutoscaler, and 7 for every metric."""

    def __init__(self, owner: str, *metrics: object) -> None:
        self._owner = owner
        self._metrics = metrics
        self.asked: dict[str, object] = {}

    def find(self, path: str) -> Any:
        if "inferenceservices" not in path:
            return None
        return {"metadata": {"name": "qwen", "namespace": "a"}, "spec": {"model": {"uri": "pvc://models/qwen"}}}

    def get(self, path: str, query: object = None) -> Any:
        if "metrics.k8s.io" in path:
            self.asked[path] = query
            return {"items": [{"value": "7"}]}
        metadata = {"name": names.engine_name("qwen"), "ownerReferences": [{"kind": self._owner}]}
        return {"items": [{"metadata": metadata, "spec": {"maxReplicas": 2, "metrics": list(self._metrics)}}]}


def test_a_metric_that_somebody_added_is_not_asked_for() -> None:
    facts = read_facts(Answers(names.KIND, CPU, QUEUE), "a", "qwen")  # type: ignore[arg-type]
    assert facts.values == {"inference_queue_depth": 7}


def test_of_keda_s_hpa_the_values_are_read_where_that_reads_them() -> None:
    answers = Answers("ScaledObject", EXTERNAL)
    facts = read_facts(answers, "a", "qwen")  # type: ignore[arg-type]
    assert facts.autoscaler is not None
    assert facts.values == {"inference_queue_depth": 7}
    path = "/apis/external.metrics.k8s.io/v1beta1/namespaces/a/s1-metric-api-inference_queue_depth"
    assert answers.asked == {path: {"labelSelector": "scaledobject.keda.sh/name=qwen-engine"}}
