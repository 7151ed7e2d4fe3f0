"""Tests what `explain` reads, with responses that a real cluster gives only for a moment."""

from typing import Any

from tests.operator.builders import build_one

from conveyor_api import names
from conveyor_insight.facts import ClassFacts, Counts, LimitFacts, read_facts

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
    """Responds like `cluster.Cluster`, with a service, its HorizontalPodAutoscaler, and 7 for every metric."""

    def __init__(self, owner: str, *metrics: object, deployment: object = None, **spec: object) -> None:
        self._spec = spec
        self._deployment = deployment
        self._owner = owner
        self._metrics = metrics
        self.queries: dict[str, object] = {}

    def find(self, path: str) -> Any:
        if "inferenceservices" not in path:
            return self._deployment
        spec = {"model": {"uri": "pvc://models/qwen"}, **self._spec}
        return {"metadata": {"name": "qwen", "namespace": "a"}, "spec": spec}

    def get(self, path: str, query: object = None) -> Any:
        if "metrics.k8s.io" in path:
            self.queries[path] = query
            return {"items": [{"value": "7"}]}
        metadata = {"name": names.engine_name("qwen"), "ownerReferences": [{"kind": self._owner}]}
        return {"items": [{"metadata": metadata, "spec": {"maxReplicas": 2, "metrics": list(self._metrics)}}]}


def test_a_metric_that_somebody_added_is_not_requested() -> None:
    facts = read_facts(Answers(names.KIND, CPU, QUEUE), "a", "qwen")  # type: ignore[arg-type]
    assert facts.values == {"inference_queue_depth": 7}


def test_of_keda_s_hpa_the_values_are_read_where_that_reads_them() -> None:
    answers = Answers("ScaledObject", EXTERNAL)
    facts = read_facts(answers, "a", "qwen")  # type: ignore[arg-type]
    assert facts.autoscaler is not None
    assert facts.values == {"inference_queue_depth": 7}
    path = "/apis/external.metrics.k8s.io/v1beta1/namespaces/a/s1-metric-api-inference_queue_depth"
    assert answers.queries == {path: {"labelSelector": "scaledobject.keda.sh/name=qwen-engine"}}


def test_each_class_is_requested_by_its_label_the_best_first() -> None:
    classes = [{"name": "batch", "level": 10}, {"name": "chat", "level": 0}]
    answers = Answers(names.KIND, queue={"classes": classes})
    facts = read_facts(answers, "a", "qwen")  # type: ignore[arg-type]
    assert facts.classes == (ClassFacts("chat", 0, 7, 7), ClassFacts("batch", 10, 7, 7))
    path = "/apis/custom.metrics.k8s.io/v1beta2/namespaces/a/inferenceservices.conveyor.dev/qwen/"
    query = {"metricLabelSelector": "request_class=batch"}
    assert answers.queries == {path + "inference_class_queued": query, path + "inference_class_wait_seconds": query}


def test_the_limits_of_a_service_with_objectives_are_requested_with_each_reason() -> None:
    answers = Answers(names.KIND, batching={"objectives": {"interTokenLatency": "40ms"}})
    facts = read_facts(answers, "a", "qwen")  # type: ignore[arg-type]
    reasons = ("declared", "predicted", "missed", "slack", "unreachable")
    assert facts.limits == LimitFacts(7, dict.fromkeys(reasons, 7))
    assert [path.rpartition("/")[2] for path in answers.queries] == [
        "inference_running_limit",
        "inference_limited_engines",
    ]


def test_the_counts_behind_the_metrics_are_read_unless_the_service_is_at_zero() -> None:
    deployment = build_one("Deployment") | {"status": {"replicas": 1, "readyReplicas": 0}}
    deployment["spec"]["replicas"] = 1
    starting = read_facts(Answers(names.KIND, QUEUE, deployment=deployment), "a", "qwen")  # type: ignore[arg-type]
    assert starting.counts == Counts(requests=7, waiting=7)
    deployment["spec"]["replicas"] = 0
    at_zero = read_facts(Answers(names.KIND, QUEUE, deployment=deployment), "a", "qwen")  # type: ignore[arg-type]
    assert at_zero.counts is None
