"""Checks that an installation works: `python -m conveyor_operator check`. The chart's `helm test` runs it.

From the API server it reads only the discovery (the list of the served APIs), which every account may read. It also
calls `/health` of the gateway.
"""

import argparse
import asyncio
import ssl
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import aiohttp

from conveyor_api import names
from conveyor_kube.kubeconfig import load_configuration
from conveyor_operator.cluster import Cluster
from conveyor_operator.errors import ApiError
from conveyor_operator.kinds import SERVED_NAME, ObjectKind
from conveyor_operator.metrics import Metrics

_CRD = ObjectKind(names.GROUP, names.VERSION, names.KIND, names.PLURAL)
_METRIC = ObjectKind(names.METRICS_GROUP, names.METRICS_VERSIONS[0], "", f"{names.CRD_NAME}/{names.IN_FLIGHT_METRIC}")
_API_SERVICE = f"{names.METRICS_VERSIONS[0]}.{names.METRICS_GROUP}"
_PAUSE_SECONDS = 2.0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m conveyor_operator check", allow_abbrev=False, description=__doc__)
    parser.add_argument("--gateway-url", required=True, help="base URL of the gateway")
    parser.add_argument(
        "--gateway-authorities", help="PEM file that verifies the gateway (if there is none: the system's authorities)"
    )
    parser.add_argument(
        "--metrics-api",
        choices=["true", "false"],
        default="true",
        help="whether the release includes the metrics server",
    )
    parser.add_argument("--timeout-seconds", type=float, default=90, help="how long to wait until everything answers")
    parser.add_argument("--kubeconfig", default="", help="kubeconfig file (default: as for the operator)")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run the check. Returns the exit code: 0 if everything answers."""
    given = build_parser().parse_args(arguments)
    return asyncio.run(_run(given))


async def _run(given: argparse.Namespace) -> int:
    deadline = time.monotonic() + given.timeout_seconds
    async with Cluster(await load_configuration(given.kubeconfig), Metrics()) as cluster:
        while faults := [fault async for fault in _look(cluster, given)]:
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(_PAUSE_SECONDS)
    for fault in faults:
        print(f"FAILED: {fault}", file=sys.stderr)
    if not faults:
        print(f"{names.CRD_NAME} is served, {given.gateway_url} answers, {_describe_metrics(given)}")
    return 1 if faults else 0


def _describe_metrics(given: argparse.Namespace) -> str:
    if given.metrics_api == "true":
        return f"{names.METRICS_GROUP} has the metrics of InferenceServices"
    return f"{names.METRICS_GROUP} is not checked (metrics.enabled is false)"


async def _look(cluster: Cluster, given: argparse.Namespace) -> AsyncIterator[str]:
    """Yield each problem, with what to do about it."""
    try:
        for kind in (_CRD, SERVED_NAME):
            if not await cluster.is_served(kind):
                crd = f"{kind.plural}.{kind.group}"
                yield f"the CRD {crd} is not installed: set crds.create=true, or apply the CRD by hand"
        if given.metrics_api == "true" and not await cluster.is_served(_METRIC):
            yield (
                f"APIService {_API_SERVICE} does not exist or belongs to another adapter, so nothing autoscales. "
                f"`kubectl get apiservice {_API_SERVICE}` shows its owner, and the operator's log says why. "
                "To leave the API to another adapter, set metrics.enabled=false"
            )
    except ApiError as error:
        yield f"the API server, or an aggregated API behind it, responds {error.status}: {error.message}"
    if fault := await _query_gateway(given.gateway_url, given.gateway_authorities):
        yield f"the gateway at {given.gateway_url}: {fault}"


def _build_tls(authorities: str | None) -> ssl.SSLContext:
    has_file = authorities is not None and Path(authorities).exists()
    return ssl.create_default_context(cafile=authorities if has_file else None)


async def _query_gateway(url: str, authorities: str | None) -> str:
    """Return why the gateway's health check fails; empty if it succeeds."""
    timeout = aiohttp.ClientTimeout(total=5)
    try:
        tls = _build_tls(authorities)
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(f"{url}/health", ssl=tls) as answer:
            return "" if answer.status == 200 else f"{answer.status} {(await answer.text())[:500]}"
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        return f"{type(error).__name__}: {error}"
