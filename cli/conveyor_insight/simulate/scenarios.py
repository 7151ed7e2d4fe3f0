"""The loads with which Conveyor's defaults were chosen. Pure; used by `conveyor_kubectl.simulating`."""

from collections.abc import Iterator

from conveyor_api import names
from conveyor_api.resource import InferenceService
from conveyor_api.spec import InferenceServiceSpec
from conveyor_insight.simulate.run import Case
from conveyor_insight.simulate.traces import Arrival, Recorded, burst, steady, step

PLAIN = InferenceService.parse(
    {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {"name": "simulated"},
        "spec": {
            "model": {"uri": "hf://example/model"},
            "batching": {"maxBatchSize": 32},
            "autoscaling": {"maxReplicas": 40},
        },
    }
).spec
"""A service with a batch of 32, for which the loads are made. Its maxReplicas is large enough to show an autoscaler
that scales up too far."""


def build_scenarios(spec: InferenceServiceSpec = PLAIN) -> Iterator[Case]:
    """Yield the scenarios: a step with three start times of pods, a small KV cache, steady load, burst, large step, and
    half a batch of requests at zero."""
    change = step(0.7, 3, at=1800, seconds=5400)
    for seconds in (60, 120, 300):
        yield Case(f"step-start-{seconds}", spec, change, start_seconds=seconds)
    yield Case("kv-carries-8", spec, steady(3.4, seconds=7200), carries=8)
    yield Case("steady", spec, steady(3.4, seconds=7200))
    yield Case("burst", spec, burst(0.7, 3, at=1800, length=120, seconds=5400))
    yield Case("large-step", spec, step(1, 12, at=1800, seconds=5400))
    if spec.autoscaling is not None and spec.autoscaling.provider == "Native":
        at_zero = spec.model_copy(update={"autoscaling": spec.autoscaling.model_copy(update={"min_replicas": 0})})
        requests = (Arrival(600, 20),) * max(1, spec.batching.effective_batch_size // 2)
        yield Case("from-zero", at_zero, Recorded((*requests, Arrival(1800, 20))), start_seconds=40)
