"""Runs an operator, a gateway and a metrics server as processes. A proxy with faults is before their real API server.

An engine answers a client all the time, through the gateway. `endure` makes a fault happen, changes the cluster
meanwhile, and tells what it cost until everything was right again.
"""

import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from tests.engine.chat_model import write_chat_model
from tests.engine.processes import IDLE, EngineServer
from tests.gateway.cluster import Cluster, own_address, publish_gateway
from tests.gateway.process import GatewayProcess
from tests.metrics.aggregation import (
    SLICES,
    Aggregated,
    free_port,
    register,
    start_server,
    stop_server,
    write_serving_certificate,
)
from tests.operator.api_proxy import ApiProxy
from tests.operator.stage import Space, wait_until

from conveyor_api.names import SYSTEM_NAMESPACE
from e2e.cluster.api import Api, ApiError
from e2e.cluster.certificates import Authority
from e2e.cluster.control_plane import ControlPlane
from e2e.cluster.definitions import install_definitions

SERVED, EDITED, ROBBED = "served", "edited", "robbed"
BYSTANDERS = ("one", "two", "three")
CALLS_PER_SECOND_MAX = 10
CALLS_OF_A_RECOVERY_MAX = 200
_RIGHT_SECONDS_MAX = 200.0
_LINES_MAX = 400

Json = dict[str, Any]


class OperatorProcess:
    """Runs `python -m conveyor_operator` for the services of one namespace, with the time of day of `clock`."""

    def __init__(self, kubeconfig: Path, namespace: str, log: Path, *flags: str, **environment: str) -> None:
        command = [sys.executable, "-m", "conveyor_operator", f"--kubeconfig={kubeconfig}", "--host=127.0.0.1"]
        command += ["--admin-port=0", f"--watch-namespaces={namespace}", "--metrics-api=false", *flags]
        self.log = log
        with log.open("ab") as file:
            self._process = subprocess.Popen(command, stderr=file, env={**os.environ, **environment})

    def kill(self) -> None:
        """Kill the process without letting it end properly."""
        self._process.kill()
        self._process.wait()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None


class Client(threading.Thread):
    """Sends five short requests per second, to each of `urls` in turn. Counts those that are not answered with 200."""

    def __init__(self, *urls: str) -> None:
        super().__init__(name="client", daemon=True)
        self.urls = urls
        self._over = threading.Event()
        self.answered = 0
        self.failed: list[str] = []

    def run(self) -> None:
        for number in itertools.count():
            if self._over.wait(0.2):
                return
            body, urls = b'{"prompt": "hello", "max_tokens": 2}', self.urls
            request = urllib.request.Request(urls[number % len(urls)], body, {"Content-Type": "application/json"})
            try:
                with urllib.request.urlopen(request, timeout=30) as answer:
                    answer.read()
                    self.answered += 1
            except OSError as error:
                self.failed.append(repr(error))

    def end(self) -> None:
        self._over.set()
        self.join()


@dataclass(frozen=True, slots=True)
class Cost:
    """The costs of a fault, until the cluster was in its desired state again."""

    seconds: float  # of the fault
    right_after_seconds: float  # after its end
    calls: int
    answered: int


class Stand:
    """All running programs. Made by `running`."""

    def __init__(
        self, plane: ControlPlane, proxy: ApiProxy, space: Space, operator: OperatorProcess, folder: Path
    ) -> None:
        self.plane, self.proxy, self.space, self.operator = plane, proxy, space, operator
        self.folder = folder
        self.gateway: GatewayProcess
        self.client: Client
        self.metrics: Aggregated
        self._numbers = itertools.count(20)

    def start_operator(self, *flags: str, **environment: str) -> OperatorProcess:
        """Start another operator in addition to the first one."""
        kubeconfig = self.folder / "kubeconfig"
        return OperatorProcess(kubeconfig, self.space.namespace, self.folder / "operator.log", *flags, **environment)

    def start_job(self, num_requests: int) -> subprocess.Popen[bytes]:
        """Start an offline job for the service with an engine. Its results are in the stand's folder `job`."""
        folder = self.folder / "job"
        folder.mkdir()
        requests = [
            {"custom_id": str(each), "url": "/v1/completions", "body": {"prompt": "hello", "max_tokens": 400}}
            for each in range(num_requests)
        ]
        (folder / "in.jsonl").write_text("".join(json.dumps(each) + "\n" for each in requests))
        command = [sys.executable, "-m", "conveyor_jobs", f"--input={folder / 'in.jsonl'}", f"--output={folder}"]
        with (folder / "log").open("wb") as log:
            url = f"{self.gateway.url}/{self.space.namespace}/{SERVED}"
            return subprocess.Popen([*command, f"--url={url}"], stderr=log)

    def replace_operator(self, *flags: str, **environment: str) -> None:
        """Kill the working operator and start another one."""
        self.operator.kill()
        self.operator = self.start_operator(*flags, **environment)

    def replace_metrics_server(self) -> None:
        """Kill the metrics server and start another one on the same ports."""
        metrics = self.metrics
        metrics.process.kill()
        metrics.process.wait()
        plane = _through(self.folder / "kubeconfig")
        metrics.process = start_server(plane, metrics.folder, metrics.port, metrics.admin_port)

    def drop_gateway(self) -> None:
        """Let the metrics server lose the gateway, until it has noticed this. Then publish the gateway again."""
        self.metrics.api.delete(f"{SLICES}/gateway")
        wait_until("the metrics server has no gateway", lambda: not self._is_measured(), _RIGHT_SECONDS_MAX)
        publish_gateway(self.metrics.api, SYSTEM_NAMESPACE, "gateway", self.gateway.admin_port)

    def gateway_code(self, service: str, namespace: str = "") -> int:
        """Return the status with which the gateway answers a request for the models of a service."""
        url = f"{self.gateway.url}/{namespace or self.space.namespace}/{service}/v1/models"
        try:
            with urllib.request.urlopen(url) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    def created_since_leading(self, service: str) -> list[str]:
        """Return the log lines of children that the present leader has created for a service."""
        lines = self.operator.log.read_text().rpartition("event=leading")[2].splitlines()
        return [line for line in lines if f"key={self.space.namespace}/{service} " in line and "=created" in line]

    def pid(self, program: str) -> int:
        """Return the process id of etcd, the API server or the controller manager."""
        (found,) = [each.pid for each in self.plane.processes.recorded() if each.name == program]
        return found

    def endure(self, fault: AbstractContextManager[object], seconds: float) -> Cost:
        """Cause a fault.

        Fails if the cluster does not recover, or if the fault costs a request, a rollout or too many calls.
        """
        undisturbed = {name: self._generation(name) for name in (SERVED, *BYSTANDERS)}
        calls, answered = self._count_calls(), self.client.answered
        most = next(self._numbers)
        began = time.monotonic()
        with fault:
            self.space.edit(EDITED, autoscaling={"maxReplicas": most})
            self.space.delete("PodDisruptionBudget", f"{ROBBED}-engine")
            time.sleep(seconds)
        ended = time.monotonic()
        wait_until("the edit has reached its child", lambda: self._most() == most, _RIGHT_SECONDS_MAX, self._most)
        wait_until("the child is back", lambda: self._is_back(), _RIGHT_SECONDS_MAX)
        wait_until("its status is written", lambda: self._is_observed(EDITED), _RIGHT_SECONDS_MAX)
        wait_until("the metric is served", self._is_measured, _RIGHT_SECONDS_MAX)
        right = time.monotonic()
        self.proxy.wait_quiet(2, 150)
        cost = Cost(ended - began, right - ended, self._count_calls() - calls, self.client.answered - answered)
        assert self.operator.alive
        assert not self.client.failed, self.client.failed
        assert cost.answered >= 3 * seconds, "the client waited"
        assert {name: self._generation(name) for name in undisturbed} == undisturbed, "a service was rolled"
        allowed = CALLS_OF_A_RECOVERY_MAX + CALLS_PER_SECOND_MAX * (right - began)
        assert cost.calls <= allowed, f"{cost.calls} calls, {allowed:.0f} allowed"
        return cost

    @contextmanager
    def logged(self, *words: str) -> Iterator[None]:
        """Check that a line in the logs of operator and gateway has these words, and that the logs are not flooded."""
        before = [len(log) for log in self._logs()]
        yield
        lines = [line for log, start in zip(self._logs(), before, strict=True) for line in log[start:]]
        lines = [line for line in lines if "event=request" not in line]
        assert any(all(word in line for word in words) for line in lines), "\n".join(lines[-50:])
        assert len([line for line in lines if "level=WARN" in line or "level=ERROR" in line]) <= _LINES_MAX
        assert not [line for line in lines if "Traceback" in line]

    def _logs(self) -> tuple[list[str], list[str]]:
        """Return the log lines of operator and gateway."""
        return self.operator.log.read_text().splitlines(), self.gateway.log

    def _count_calls(self) -> int:
        """Return the number of calls that the proxy saw, except the Lease's. Calls that it did not answer count too."""
        return len([call for call in self.proxy.calls if call.resource != "leases"]) + self.proxy.num_cut

    def _generation(self, service: str) -> int:
        return int(self.space.need("Deployment", f"{service}-engine")["metadata"]["generation"])

    def _most(self) -> int:
        return int(self.space.need("HorizontalPodAutoscaler", f"{EDITED}-engine")["spec"]["maxReplicas"])

    def _is_back(self) -> bool:
        return self.space.get("PodDisruptionBudget", f"{ROBBED}-engine") is not None

    def _is_observed(self, name: str) -> bool:
        body = self.space.need("InferenceService", name)
        return bool(body["status"]["observedGeneration"] == body["metadata"]["generation"])

    def _is_measured(self) -> bool:
        try:
            return bool(self.metrics.value(SERVED, namespace=self.space.namespace))
        except ApiError:
            return False


@contextmanager
def running(folder: Path, namespace: str = "team") -> Iterator[Stand]:
    """Run a stand with five services, one of which has an engine."""
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        plane = enter(ControlPlane())
        api = Api(plane.kubeconfig)
        install_definitions(api)
        api.create("/api/v1/namespaces", {"metadata": {"name": namespace}})
        proxy = enter(ApiProxy(plane.kubeconfig).running())
        kubeconfig, space = proxy.write_kubeconfig(folder / "kubeconfig"), Space(api, namespace)
        operator = OperatorProcess(kubeconfig, namespace, folder / "operator.log")
        stand = Stand(plane, proxy, space, operator, folder)
        stack.callback(lambda: stand.operator.kill())
        for name in (SERVED, ROBBED, *BYSTANDERS):
            space.make_service(name)
        space.make_service(EDITED, autoscaling={"maxReplicas": 9})
        flags: Json = {"host": "0.0.0.0", "max_num_seqs": 8}
        engine = enter(EngineServer(folder / "engine", write_chat_model(folder / "model"), IDLE, **flags)).wait_ready()
        Cluster(api, namespace).apply_engine(SERVED, own_address(), int(engine.url.rpartition(":")[2]))
        stand.gateway = enter(GatewayProcess(kubeconfig, "--host", "0.0.0.0"))
        publish_gateway(api, SYSTEM_NAMESPACE, "gateway", stand.gateway.admin_port)
        stand.metrics = enter(_measured(plane, kubeconfig, folder))
        for name in (SERVED, ROBBED, EDITED, *BYSTANDERS):
            space.wait_observed(name)
        stand.client = Client(f"{stand.gateway.url}/{namespace}/{SERVED}/v1/completions")
        stand.client.start()
        stack.callback(stand.client.end)
        wait_until("the client is answered", lambda: stand.client.answered > 5, 60, lambda: stand.client.failed)
        stand.client.failed.clear()
        wait_until("the metric is served", stand._is_measured)
        proxy.wait_quiet(2)
        yield stand


def _through(kubeconfig: Path) -> ControlPlane:
    """Return a control plane that programs reach through the proxy."""
    return cast(ControlPlane, SimpleNamespace(kubeconfig=kubeconfig))


@contextmanager
def _measured(plane: ControlPlane, kubeconfig: Path, folder: Path) -> Iterator[Aggregated]:
    """Run the metrics server. It is registered at the API server, and reaches it through the proxy."""
    authority = Authority(folder, "metrics-authority")
    write_serving_certificate(authority, folder)
    through_proxy = _through(kubeconfig)
    port, admin_port = free_port(), free_port()
    process = start_server(through_proxy, folder, port, admin_port)
    aggregated = Aggregated(plane, folder, authority, port, admin_port, process)
    try:
        register(aggregated.api, port, authority)
        yield aggregated
    finally:
        stop_server(aggregated.process, folder)


def build_clock(folder: Path) -> tuple[dict[str, str], Callable[[int], None]]:
    """Return an environment for processes whose time of day can be shifted, and a function that shifts it."""
    library, offset = folder / "clock.so", folder / "clock-offset"
    source = Path(__file__).parent / "clock.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    offset.write_bytes(bytes(8))

    def shift(seconds: int) -> None:
        with offset.open("r+b") as file:  # in place: the process has mapped it
            file.write(seconds.to_bytes(8, "little", signed=True))

    return {"LD_PRELOAD": str(library), "CLOCK_OFFSET": str(offset)}, shift
