"""The attacks of the command `hostile-control`: clients on ports, and a tenant with all rights in its namespace.

Each attack runs in threads until its stage ends. If `stage.aimed` is false, the attack has an unmeasured target:
another metrics server, or objects that neither the operator nor the metrics server watches.
"""

import contextlib
import itertools
import os
import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.operator.stage import Space, make_service

from conveyor_api import names
from e2e.cluster.api import Api, ApiError

TENANT = "tenant"
MIB = 1 << 20
PAUSE_SECONDS = 0.01  # between repeated actions: their cost is measured, not how many are possible
_ids = itertools.count()


@dataclass(slots=True)
class Stage:
    """The targets of an attack, and its progress.

    `ports` are all listening ports, `https` is the port of the metrics API, `pages` is the URL of a program's own
    metrics, and `value` is the path of the tenant's metric.
    """

    kubeconfig: Path  # the tenant's
    aimed: bool
    ports: list[int]
    https: int
    pages: str
    value: str
    num_services: int
    ended: threading.Event = field(default_factory=threading.Event)
    num_done: int = 0

    def repeat(self, act: Callable[[Space], None], num_threads: int, most: int = 1 << 40) -> None:
        """Call `act` with the tenant's namespace until the end, or `most` times. Refused calls are not counted."""

        def go_on() -> None:
            space = Space(Api(self.kubeconfig), TENANT)
            while not self.ended.is_set() and self.num_done < most:
                with contextlib.suppress(ApiError, OSError):
                    act(space)
                    self.num_done += 1

        for _ in range(num_threads):
            threading.Thread(target=go_on, daemon=True).start()


Attack = Callable[[Stage], None]


# Clients on ports


def _connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=5)


def _send_often(stage: Stage, sent: Iterator[bytes], pause_seconds: float, num_threads: int) -> None:
    def act(_: Space) -> None:
        for port in stage.ports:
            with _connect(port) as client:
                for _line in range(64):
                    client.sendall(next(sent))
                    if stage.ended.wait(pause_seconds):
                        return

    stage.repeat(act, num_threads)


def idle(stage: Stage) -> None:
    """Open new connections all the time, and keep more of them open than allowed."""
    opened: list[socket.socket] = []

    def act(_: Space) -> None:
        for port in stage.ports:
            opened.extend(_connect(port) for _ in range(50))
        for client in opened[:-2000]:
            client.close()
        del opened[:-2000]
        time.sleep(0.2)

    stage.repeat(act, 1)


def slow(stage: Stage) -> None:
    """Send requests whose heads arrive slowly, line by line."""
    _send_often(stage, itertools.cycle([b"GET /livez HTTP/1.1\r\n", *[b"X-Slow: 1\r\n"] * 63]), 0.2, 200)


def bodies(stage: Stage) -> None:
    """Send large bodies to paths that accept none."""
    head = f"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: {64 * MIB}\r\n\r\n".encode()
    _send_often(stage, itertools.cycle([head, *[b"x" * MIB] * 63]), 0, 8)


def garbage(stage: Stage) -> None:
    """Send bytes that are neither HTTP nor TLS."""
    noise = os.urandom(16 << 10)

    def act(_: Space) -> None:
        for port in stage.ports:
            with _connect(port) as client:
                client.sendall(noise)
        stage.ended.wait(4 * PAUSE_SECONDS)

    stage.repeat(act, 4)


def pages(stage: Stage) -> None:
    """Read the page with the metrics of the process, which has one line for each time series."""

    def act(_: Space) -> None:
        with urllib.request.urlopen(stage.pages, timeout=10) as answer:
            answer.read()

    stage.repeat(act, 4)


def handshakes(stage: Stage) -> None:
    """Open TLS connections to the metrics API, and send a request without the front proxy's certificate."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE

    def act(_: Space) -> None:
        with _connect(stage.https) as client, context.wrap_socket(client) as tls:
            tls.sendall(b"GET /apis/custom.metrics.k8s.io/v1beta2 HTTP/1.1\r\nHost: x\r\n\r\n")
            tls.recv(1 << 12)
        stage.ended.wait(8 * PAUSE_SECONDS)

    stage.repeat(act, 8)


def values(stage: Stage) -> None:
    """Read the tenant's own metric through the API server."""

    def act(space: Space) -> None:
        space.api.send("GET", stage.value)

    stage.repeat(act, 16)


# A tenant in its namespace


def _write(space: Space, kind: str, body: dict[str, Any], aimed: bool) -> None:
    """Write the object; if the attack is not aimed, a ConfigMap of about the same size."""
    space.create(kind if aimed else "ConfigMap", body if aimed else _as_config_map(body))


def _as_config_map(body: dict[str, Any]) -> dict[str, Any]:
    return {"metadata": body["metadata"], "data": {"spec": str(body.get("spec"))}}


def services(stage: Stage) -> None:
    """Create thousands of InferenceServices."""

    def act(space: Space) -> None:
        _write(space, "InferenceService", make_service(f"s-{next(_ids)}", replicas=0), stage.aimed)

    stage.repeat(act, 8, most=stage.num_services)


def edits(stage: Stage) -> None:
    """Change one service as fast as the API server accepts."""
    _edit(stage, make_service(f"edited-{next(_ids)}", replicas=0))


def large(stage: Stage) -> None:
    """Change one service with the largest metadata and spec that are admitted."""
    body = make_service(f"large-{next(_ids)}", replicas=0)
    body["metadata"]["annotations"] = {f"a{number:03}": "x" * 1000 for number in range(250)}
    body["metadata"]["labels"] = {f"l{number:05}": str(number) for number in range(2000)}
    env = [{"name": f"E{number}", "value": "x" * 4096} for number in range(64)]
    annotations = {f"a{number}": "x" * 4096 for number in range(32)}
    body["spec"] |= {"pod": {"env": env, "annotations": annotations}}
    _edit(stage, body)


def _edit(stage: Stage, body: dict[str, Any]) -> None:
    kind, name = ("InferenceService" if stage.aimed else "ConfigMap"), body["metadata"]["name"]
    owner = Space(Api(stage.kubeconfig), TENANT)
    _write(owner, "InferenceService", body, stage.aimed)

    def act(space: Space) -> None:
        length = 256 + next(_ids) % 256
        spec = {"spec": {"engine": {"maxModelLen": length}}} if stage.aimed else {"data": {"edited": str(length)}}
        space.patch(kind, name, spec)

    stage.repeat(act, 4)


def claims(stage: Stage) -> None:
    """Delete the names that the operator has claimed for the tenant's services, so that it claims them again."""
    owner = Space(Api(stage.kubeconfig), TENANT)
    for _ in range(20):
        _write(owner, "InferenceService", make_service(f"claimed-{next(_ids)}", replicas=0), stage.aimed)

    def act(space: Space) -> None:
        if not stage.aimed:
            name = f"claim-{next(_ids)}"
            space.create("ConfigMap", {"metadata": {"name": name}})
            space.delete("ConfigMap", name)
        for claim in space.list("ServedName") if stage.aimed else ():
            with contextlib.suppress(ApiError):  # another thread was faster
                space.delete("ServedName", claim["metadata"]["name"])
        stage.ended.wait(PAUSE_SECONDS)

    stage.repeat(act, 4)


def events(stage: Stage) -> None:
    """Create Events about a service, with Conveyor's labels."""
    involved = {"kind": names.KIND, "namespace": TENANT, "name": "good", "apiVersion": names.API_VERSION}
    labels = _our_labels("good")

    def act(space: Space) -> None:
        metadata = {"name": f"e-{next(_ids)}", "labels": labels if stage.aimed else {}}
        space.create("Event", {"metadata": metadata, "involvedObject": involved, "reason": "Flood"})

    stage.repeat(act, 8)


def pods(stage: Stage) -> None:
    """Create pods with Conveyor's labels, for services that exist or not, and delete two thirds of them."""

    def act(space: Space) -> None:
        number = next(_ids)
        labels = _our_labels("good" if number % 2 else f"none-{number}") if stage.aimed else {}
        container = {"name": "engine", "image": "x"}
        spec = {"containers": [container], "automountServiceAccountToken": False}
        space.create("Pod", {"metadata": {"name": f"p-{number}", "labels": labels}, "spec": spec})
        if number % 3:
            space.api.call("DELETE", space.path("Pod", f"p-{number}"), {"gracePeriodSeconds": 0})

    stage.repeat(act, 8)


def _our_labels(service: str) -> dict[str, str]:
    return {**names.child_labels(service), names.INFERENCE_SERVICE_LABEL: service}


ATTACKS: dict[str, Attack] = {
    each.__name__: each
    for each in (idle, slow, bodies, garbage, pages, handshakes, values, edits, large, claims, events, pods, services)
}
