"""Measures how soon a Deployment gets a replica after the first request for a service that is scaled to zero.

A real operator and two real gateways run with a real etcd, API server and controller manager. No pods run. There are
100 services, all scaled to zero. Each in turn gets a request at one of the gateways, and the command
measures the time until a watch shows that its Deployment has a replica. At the end the operator is killed and a request
is sent immediately. The command then measures the time until another operator, which stands by, has acquired the Lease
and set a replica. Prints a table and one JSON line. Exits with 1 if the 99th percentile is more than a second, or the
failover takes longer than the Lease's duration plus two seconds.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from subprocess import Popen

import aiohttp
from tests.gateway.cluster import publish_gateway
from tests.gateway.process import GatewayProcess
from tests.operator.stage import Space, make_service, wait_until

from conveyor_api.names import OPERATOR_LEASE
from conveyor_bench.processes import running
from conveyor_kube.wanted_json import Json
from conveyor_kube.watch import Collection, WatchState, connect, watch_collection
from conveyor_kube.watched_list import WatchedList
from conveyor_load.percentiles import percentile
from conveyor_operator.election import LEASE_SECONDS
from e2e.cluster.api import Api
from e2e.cluster.control_plane import ControlPlane
from e2e.cluster.definitions import install_definitions

NAMESPACE = "default"
LAST = "service-of-the-failover"
BAR_SECONDS = 1.0
FAILOVER_BAR_SECONDS = LEASE_SECONDS + 2.0
AUTOSCALING = {"minReplicas": 0, "maxReplicas": 2}


class Replicas:
    """The number of replicas in each Deployment's spec, from a watch."""

    def __init__(self) -> None:
        self._requested: dict[str, int] = {}
        self._changed = asyncio.Event()

    def take(self, deployments: list[Json]) -> None:
        self._requested = {body["metadata"]["name"]: body["spec"].get("replicas", 1) for body in deployments}
        self._changed.set()

    async def wait(self, name: str, count: int) -> None:
        async with asyncio.timeout(60):
            while self._requested.get(name) != count:
                self._changed.clear()
                await self._changed.wait()


async def measure(kubeconfig: Path, gateways: list[GatewayProcess], names: list[str]) -> list[float]:
    """Return the seconds from a request to the replica for each service. The request is then cancelled."""
    deployments = Collection("apps", "v1", "deployments", NAMESPACE, shape=dict)
    replicas = Replicas()
    async with connect(str(kubeconfig)) as client, aiohttp.ClientSession() as http:
        watching = watch_collection(client, deployments, WatchedList(replicas.take), WatchState("deployments"))
        watch = asyncio.create_task(watching)
        found = []
        for number, name in enumerate(names):
            await replicas.wait(f"{name}-engine", 0)
            await asyncio.sleep(0.037 * (number % 14))  # so that requests arrive at all times of the operator's period
            gateway = gateways[number % len(gateways)]
            began = time.monotonic()
            request = asyncio.create_task(
                http.post(f"{gateway.url}/{NAMESPACE}/{name}/v1/completions", json={"prompt": ""})
            )
            await replicas.wait(f"{name}-engine", 1)
            found.append(time.monotonic() - began)
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
    return found


async def measure_failover(kubeconfig: Path, gateway: GatewayProcess, name: str, leader: Popen[bytes]) -> float:
    """Return the seconds from a request right after the leader's death to the replica."""
    leader.kill()
    (seconds,) = await measure(kubeconfig, [gateway], [name])
    return seconds


@contextmanager
def elected(kubeconfig: Path, identity: str) -> Iterator[Popen[bytes]]:
    """Run an operator. The first one becomes the leader."""
    flags = ("--leader-elect=true", f"--identity={identity}", f"--system-namespace={NAMESPACE}", "--metrics-api=false")
    with running("conveyor_operator", kubeconfig, *flags) as process:
        wait_until("a leader", lambda: Space(Api(kubeconfig), NAMESPACE).get("Lease", OPERATOR_LEASE), 60)
        yield process


def put_to_zero(space: Space, names: list[str]) -> None:
    for name in names:
        space.create("InferenceService", make_service(name, autoscaling=AUTOSCALING))
    for name in names:
        engine = f"{name}-engine"
        wait_until(f"the HPA of {name}", partial(space.get, "HorizontalPodAutoscaler", engine))
        space.patch("Deployment", engine, {"spec": {"replicas": 0}})


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m conveyor_bench wake", description=__doc__)
    parser.add_argument("--services", type=int, default=100, help="how many InferenceServices (default: 100)")
    given = parser.parse_args(argv)
    names = [f"service-{number}" for number in range(given.services)]
    with ControlPlane(hpa_sync_period_seconds=15) as plane:
        space = Space(Api(plane.kubeconfig), NAMESPACE)
        install_definitions(space.api)
        flags = ("--host", "", "--drain-delay-seconds", "0")
        with GatewayProcess(plane.kubeconfig, *flags) as one, GatewayProcess(plane.kubeconfig, *flags) as two:
            for name, gateway in (("one", one), ("two", two)):
                publish_gateway(space.api, NAMESPACE, name, gateway.admin_port)
            with elected(plane.kubeconfig, "first") as leader, elected(plane.kubeconfig, "second"):
                put_to_zero(space, [*names, LAST])
                found = sorted(asyncio.run(measure(plane.kubeconfig, [one, two], names)))
                failover = asyncio.run(measure_failover(plane.kubeconfig, one, LAST, leader))
    result = {"p50": statistics.median(found), "p99": percentile(found, 99), "longest": found[-1]}
    result["failover"] = failover
    for what, seconds in result.items():
        print(f"{what:<10} {seconds:>8.3f} s")
    print(json.dumps({"services": given.services} | {f"{key}_seconds": round(s, 3) for key, s in result.items()}))
    return 1 if result["p99"] > BAR_SECONDS or failover > FAILOVER_BAR_SECONDS else 0
