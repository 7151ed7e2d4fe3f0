"""Tests for which pods the warm-up is requested when they become Ready, and what is counted of their starts."""

from dataclasses import replace
from typing import Any

from tests.operator.builders import OWNER, QuietSources, make_pod, make_services

from conveyor_api import names
from conveyor_operator.activity.warm_ups import ReportWarmUp
from conveyor_operator.inferenceservice.kinds import INFERENCE_SERVICE
from conveyor_operator.inferenceservice.memory import ServiceMemory
from conveyor_operator.inferenceservice.pods import ContainerState, PodState
from conveyor_operator.kinds import POD, Key
from conveyor_operator.loop.store import Store
from conveyor_operator.metrics import Metrics

FETCH = ContainerState(
    "fetch", initial=True, ended=True, started_at="2026-11-22T08:00:01Z", ended_at="2026-11-22T08:00:05Z"
)
READY_POD = replace(
    make_pod("a", FETCH),
    uid="uid-a",
    ready=True,
    created_at="2026-11-22T08:00:00Z",
    ready_at="2026-11-22T08:00:25Z",
)


class WarmUpSources(QuietSources):
    """Sources that record the requests for warm-up times."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, ReportWarmUp]] = []

    def request_warm_up(self, service: str, pod: str, report: ReportWarmUp) -> None:
        self.requests.append((service, pod, report))


class Reconciles:
    """Reconciles of one service, without a cluster. `requests` are the requests to the gateways."""

    def __init__(self) -> None:
        sources = WarmUpSources()
        self.requests = sources.requests
        self.memory = ServiceMemory(OWNER.uid)
        self._metrics = Metrics()
        self._services = make_services(self._metrics, sources)

    def see(self, *pods: PodState, last_start: dict[str, str] | None = None, **spec: Any) -> None:
        store, key = Store(), Key(INFERENCE_SERVICE, OWNER.namespace, OWNER.name)
        for pod in pods:
            store.put(POD, pod.uid, key, pod)
        metadata = {"name": OWNER.name, "namespace": OWNER.namespace, "uid": OWNER.uid, "generation": 1}
        status = {"effective": {"podStarts": ["25s"]}, "lastStart": last_start} if last_start else {}
        body = {"apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": metadata, "status": status}
        self._services.begin(body | {"spec": {"model": {"uri": "hf://example/model"}, **spec}}, store, self.memory)

    @property
    def counted(self) -> dict[str, float]:
        (family,) = [each for each in self._metrics.registry.collect() if each.name.endswith("pod_start_seconds")]
        return {sample.labels["part"]: sample.value for sample in family.samples if sample.name.endswith("_sum")}

    @property
    def reported(self) -> dict[str, int]:
        assert self.memory.pod_starts is not None
        return dict(self.memory.pod_starts.last.seconds) if self.memory.pod_starts.last else {}


def test_a_ready_pod_is_queried_once_and_counted_when_its_warm_up_is_known() -> None:
    service = Reconciles()
    service.see(replace(READY_POD, ready=False))
    assert service.requests == []
    for _ in range(2):
        service.see(READY_POD)
    ((key, pod, report),) = service.requests
    assert (key, pod) == (f"{OWNER.namespace}/{OWNER.name}", "uid-a")
    assert service.reported == {"total": 25, "model": 4, "load": 20}
    assert service.counted == {}
    report(6.3)
    assert service.reported == service.counted == {"total": 25, "model": 4, "load": 14, "warm_up": 6}


def test_a_start_without_a_reported_warm_up_is_counted_whole() -> None:
    service = Reconciles()
    service.see(READY_POD)
    ((_, _, report),) = service.requests
    report(None)
    assert service.reported == service.counted == {"total": 25, "model": 4, "load": 20}


def test_engines_that_do_not_report_a_warm_up_are_not_queried() -> None:
    service = Reconciles()
    service.see(READY_POD, runtime="VLLM", engine={"image": "example/vllm:1"})
    assert service.requests == []
    assert service.reported == service.counted == {"total": 25, "model": 4, "load": 20}


def test_a_start_without_a_load_is_not_queried() -> None:
    service = Reconciles()
    service.see(replace(READY_POD, containers=()))
    assert service.requests == []
    assert service.counted == {"total": 25}


def test_the_next_operator_queries_what_the_status_lacks_and_does_not_count_it_again() -> None:
    service = Reconciles()
    service.see(READY_POD, last_start={"podName": "a", "total": "25s", "load": "20s"})
    ((_, pod, report),) = service.requests
    report(6)
    assert pod == "uid-a"
    assert service.reported == {"total": 25, "load": 14, "warm_up": 6}
    assert service.counted == {}


def test_the_next_operator_queries_nothing_that_the_status_has() -> None:
    service = Reconciles()
    service.see(READY_POD, last_start={"podName": "a", "total": "25s", "load": "14s", "warmUp": "6s"})
    assert service.requests == []
