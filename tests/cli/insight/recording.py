"""Records the decisions of a real HPA controller for metric values from a script.

`python -m tests.cli.insight.recording` writes `recorded.json` next to this file, in about three minutes. It runs all
HPAs of `HPAS` at once, on their own control plane.
"""

import json
import ssl
import tempfile
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from pathlib import Path
from random import Random
from typing import Any

from tests.metrics.aggregation import register, write_serving_certificate
from tests.operator.builders import make_resource
from tests.operator.metrics_api.adapters import build_deployment

from conveyor_api import names
from conveyor_insight.hpa import Controller
from conveyor_metrics.documents import build_metric_values, build_resource_list
from conveyor_operator.inferenceservice.desired import build_owner
from conveyor_operator.inferenceservice.manifests.autoscaling import build_autoscaler
from e2e.cluster.api import Api, wait_until
from e2e.cluster.certificates import Authority
from e2e.cluster.control_plane import ControlPlane
from e2e.cluster.definitions import install_definitions
from e2e.other_adapter import Handler

Json = dict[str, Any]
Values = tuple[int | None, int | None]

RECORDED = Path(__file__).with_name("recorded.json")
# The controller decides one second away from the ends of the periods and windows below, so it is clear what is within
# them.
CONTROLLER = Controller(sync_period_seconds=2, downscale_stabilization_seconds=7)
AUTOSCALING = {"minReplicas": 2, "maxReplicas": 30, "targetUtilizationPercent": 100}
_HPAS_PATH = "/apis/autoscaling/v2/namespaces/default/horizontalpodautoscalers"
_DEPLOYMENTS_PATH = "/apis/apps/v1/namespaces/default/deployments"


def policies(*each: tuple[str, int, int]) -> list[Json]:
    return [{"type": type, "value": value, "periodSeconds": seconds} for type, value, seconds in each]


# `behavior` as it reaches the HPA; None for an HPA without one.
HPAS: dict[str, Json | None] = {
    "absent": None,
    "empty": {},
    "up-slowly": {"scaleUp": {"policies": policies(("Pods", 2, 9))}, "scaleDown": {"stabilizationWindowSeconds": 5}},
    "up-stable": {
        "scaleUp": {"stabilizationWindowSeconds": 5},
        "scaleDown": {"stabilizationWindowSeconds": 3, "policies": policies(("Percent", 40, 7))},
    },
    "smaller": {
        "scaleUp": {"selectPolicy": "Min", "policies": policies(("Pods", 3, 5), ("Percent", 50, 9))},
        "scaleDown": {
            "selectPolicy": "Min",
            "stabilizationWindowSeconds": 0,
            "policies": policies(("Pods", 2, 7), ("Percent", 30, 5)),
        },
    },
    "larger": {
        "scaleUp": {"policies": policies(("Pods", 1, 5), ("Percent", 80, 9))},
        "scaleDown": {"stabilizationWindowSeconds": 3, "policies": policies(("Pods", 4, 7), ("Percent", 10, 5))},
    },
    "never-down": {"scaleUp": {"tolerance": "0.5"}, "scaleDown": {"selectPolicy": "Disabled"}},
    "never-up": {"scaleUp": {"selectPolicy": "Disabled"}, "scaleDown": {"stabilizationWindowSeconds": 0}},
}


@dataclass
class Hpa:
    """One HPA of a recording. `rows`: time of the decision, replicas before it, requests in flight, queue depth."""

    name: str
    body: Json
    script: Generator[Values, int, None]
    rows: list[list[float | int | None]] = field(default_factory=list)

    @classmethod
    def make(cls, name: str, behavior: Json | None) -> "Hpa":
        spec = make_resource(batching={"maxBatchSize": 10}, autoscaling=AUTOSCALING).spec
        body = build_autoscaler(build_owner("default", name, ""), spec, 420)
        assert body is not None
        hpa_spec = body["spec"] | {"scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": name}}
        hpa_spec.pop("behavior", None)
        hpa_spec |= {} if behavior is None else {"behavior": behavior}
        script = play(name)
        next(script)  # until it needs the number of replicas
        return cls(name, body | {"metadata": {"name": name}, "spec": hpa_spec}, script)


def play(seed: str) -> Generator[Values, int, None]:
    """Yield values: plateaus, jumps, unreadable metrics, and sometimes in-flight values at the edge of the tolerance.

    The caller sends the present number of replicas. The first values do not change it: the first decision is slow, and
    it is not known when the controller began. When they end, both have left the stabilization window.
    """
    random = Random(seed)
    replicas = yield (None, None)
    for _ in range(5):
        replicas = yield (10 * replicas, 0)
    while True:
        in_flight, depth = random.choice([0, 20, 37, 110, 150, 250]), random.choice([0, 0, 1, 5, 12])
        for _ in range(random.randint(2, 7)):
            edge = random.choice([9, 11]) * replicas
            value = edge if random.random() < 0.2 else in_flight
            replicas = yield (_lose(random, value), _lose(random, depth))


def _lose(random: Random, value: int) -> int | None:
    return None if random.random() < 0.06 else value


class ValueServer(ThreadingHTTPServer):
    """Serves custom.metrics.k8s.io: the values of the scripts, a new pair for each read of the first metric."""

    def __init__(self, api: Api, hpas: list[Hpa], context: ssl.SSLContext) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.daemon_threads = False  # so that closing waits for the threads
        self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        self._api = api
        self._hpas = {hpa.name: hpa for hpa in hpas}
        self._values: dict[str, Values] = {}
        self._replicas: dict[str, int] = {}

    def read(self, name: str, metric: str) -> int | None:
        """Return a value. The controller reads both metrics in this order and decides; the second read adds a row."""
        if metric == names.IN_FLIGHT_METRIC:
            deployment = self._api.get(f"{_DEPLOYMENTS_PATH}/{name}")
            self._replicas[name] = int(deployment["spec"]["replicas"])
            # The tolerance depends on the pods that exist. Until all requested pods exist, return no values.
            is_settled = deployment["status"].get("replicas") == self._replicas[name]
            self._values[name] = self._hpas[name].script.send(self._replicas[name]) if is_settled else (None, None)
            return self._values[name][0]
        self._hpas[name].rows.append([round(time.monotonic(), 3), self._replicas[name], *self._values[name]])
        return self._values[name][1]


class _Handler(Handler):
    server: ValueServer

    def answer(self, path: str) -> Json | None:
        match path.split("/"):
            case ["", "apis", _, version]:
                return build_resource_list(version)
            case ["", "apis", _, version, "namespaces", namespace, _, name, metric]:
                value = self.server.read(name, metric)
                return None if value is None else build_metric_values(version, namespace, name, metric, value)
        return None


@contextmanager
def serving(plane: ControlPlane, hpas: list[Hpa]) -> Iterator[Api]:
    """Run a control plane's API with InferenceServices and their metrics."""
    api = Api(plane.kubeconfig)
    install_definitions(api)
    with tempfile.TemporaryDirectory() as folder:
        authority = Authority(Path(folder), "metrics-authority")
        write_serving_certificate(authority, Path(folder))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(Path(folder, "tls.crt"), Path(folder, "tls.key"))
        server = ValueServer(api, hpas, context)
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            register(api, server.server_port, authority)
            yield api
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


def record(num_looks: int) -> list[Hpa]:
    """Record every HPA of `HPAS` over `num_looks` decisions. An earlier HPA waits for the API, so none is missed."""
    first, hpas = Hpa.make("first", None), [Hpa.make(name, behavior) for name, behavior in HPAS.items()]
    with (
        ControlPlane(CONTROLLER.sync_period_seconds, CONTROLLER.downscale_stabilization_seconds) as plane,
        serving(plane, [first, *hpas]) as api,
    ):
        for hpa in (first, *hpas):
            api.create(_DEPLOYMENTS_PATH, build_deployment(hpa.name, replicas=3))
        for hpa in (first, *hpas):
            path = f"{_DEPLOYMENTS_PATH}/{hpa.name}"
            wait_until("its pods", lambda path=path: api.get(path)["status"].get("replicas") == 3)
            api.create(_HPAS_PATH, hpa.body)
            wait_until("the controller's knowledge of the API", lambda: first.rows)
        enough = lambda: all(len(hpa.rows) >= num_looks for hpa in hpas)  # noqa: E731
        wait_until(f"{num_looks} looks", enough, plane.processes.check, 240 + 3 * num_looks)
    return hpas


def main() -> None:
    hpas = [{"behavior": HPAS[hpa.name], "body": hpa.body, "rows": hpa.rows} for hpa in record(60)]
    RECORDED.write_text(json.dumps(hpas))


if __name__ == "__main__":
    main()
