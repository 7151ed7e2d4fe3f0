"""`kubectl conveyor advise`: reads the service and its engines' metrics, and prints text or JSON. Used by `command`."""

import argparse
import asyncio
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import aiohttp
import yaml

from conveyor_api import names
from conveyor_api.resource import InferenceService
from conveyor_http.reading import AnswerTooLong, read_answer
from conveyor_insight.advising import Advice, advise
from conveyor_insight.facts import Unanswered
from conveyor_insight.traffic import Traffic, read_traffic
from conveyor_kubectl.cluster import Cluster
from conveyor_kubectl.forwarding import forwarded, kubectl_flags
from conveyor_kubectl.tuned import read_service

DESCRIPTION = """Recommend a batching mode and a batch limit for a service, from its task and the traffic that its
engines have seen. The decision flow is in docs/batching.md. Nothing is written, and no request is sent to the model."""

_MAX_PAGE_BYTES: Final = 8 << 20
_MAX_ENGINES: Final = 8
_TIMEOUT: Final = aiohttp.ClientTimeout(total=10)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that only this command has."""
    parser.add_argument("-o", "--output", choices=["text", "json"], default="text", help="default: %(default)s")
    parser.add_argument(
        "--metrics",
        action="append",
        metavar="URL|FILE",
        help="where to read an engine's metrics; repeat the flag for several engines. Default: kubectl port-forward to "
        f"each engine, at most {_MAX_ENGINES}",
    )


def show_advice(cluster: Cluster, flags: argparse.Namespace, show: Callable[[str], None]) -> int:
    """Run the command and return its exit code. Raises Unanswered."""
    namespace = flags.namespace or cluster.namespace
    service, _ = read_service(cluster, namespace, flags.name)
    pages = asyncio.run(_read_pages(cluster, namespace, flags))
    try:
        traffic = read_traffic(pages)
    except (ValueError, LookupError) as error:
        raise Unanswered(f"an engine's metrics cannot be read: {error}") from error
    advice = advise(service, traffic)
    show(_build_json(advice, traffic) if flags.output == "json" else _build_text(service, traffic, advice))
    return 0


async def _read_pages(cluster: Cluster, namespace: str, flags: argparse.Namespace) -> list[str]:
    async with aiohttp.ClientSession(timeout=_TIMEOUT) as session:
        if flags.metrics:
            return [await _fetch(session, each) if _is_url(each) else _read_file(each) for each in flags.metrics]
        pages = []
        for pod in _find_engines(cluster, namespace, flags.name)[:_MAX_ENGINES]:
            async with forwarded(namespace, f"pod/{pod}", names.ENGINE_PORT, kubectl_flags(flags)) as url:
                pages.append(await _fetch(session, url + names.PROMETHEUS_PATH))
        return pages


def _find_engines(cluster: Cluster, namespace: str, name: str) -> list[str]:
    """Return the names of the service's ready pods."""
    found = cluster.get(
        f"/api/v1/namespaces/{namespace}/pods", {"labelSelector": f"{names.INFERENCE_SERVICE_LABEL}={name}"}
    )
    return [pod["metadata"]["name"] for pod in found["items"] if _is_ready(pod.get("status") or {})]


def _is_ready(status: dict[str, object]) -> bool:
    conditions = status.get("conditions")
    return isinstance(conditions, list) and any(
        each.get("type") == "Ready" and each.get("status") == "True" for each in conditions
    )


def _is_url(source: str) -> bool:
    return source.startswith(("http://", "https://"))


def _read_file(source: str) -> str:
    try:
        with Path(source).open(encoding="utf-8", errors="replace") as file:
            page = file.read(_MAX_PAGE_BYTES + 1)
    except OSError as error:
        raise Unanswered(f"no metrics: {error}") from error
    if len(page) > _MAX_PAGE_BYTES:
        raise Unanswered(f"no metrics: {source} is longer than {_MAX_PAGE_BYTES >> 20} MiB")
    return page


async def _fetch(session: aiohttp.ClientSession, url: str) -> str:
    try:
        async with session.get(url) as response:
            body = bytes(await read_answer(response.content, _MAX_PAGE_BYTES))
            if response.status != 200:
                raise Unanswered(f"{url} answers {response.status}")
            return body.decode(errors="replace")
    except (aiohttp.ClientError, TimeoutError, AnswerTooLong) as error:
        raise Unanswered(f"{url}: {error or type(error).__name__}") from error


def _build_text(service: InferenceService, traffic: Traffic, advice: Advice) -> str:
    batching = service.batching
    head = (
        f"InferenceService {service.key}: task {service.task or 'not known'}, mode {batching.mode}, "
        f"maxBatchSize {batching.chosen_batch_size}; {traffic.engines} engines have seen {traffic.requests} requests"
    )
    parts = [head, "\n".join(advice.sentences), "Nothing needs to change."]
    if patch := _build_patch(advice):
        parts[-1] = yaml.safe_dump(patch, sort_keys=False).rstrip()
    if advice.tune_flags:
        command = f"kubectl conveyor tune {shlex.quote(service.name)} -n {service.namespace} --replica"
        parts.append(f"To measure it with this traffic:\n{' '.join([command, *advice.tune_flags])}")
    return "\n\n".join(parts)


def _build_patch(advice: Advice) -> dict[str, Any] | None:
    changed = {name: part for name, part in (("batching", advice.fields), ("workload", advice.workload)) if part}
    return {"spec": changed} if changed else None


def _build_json(advice: Advice, traffic: Traffic) -> str:
    fields = {
        "mode": advice.mode,
        "maxBatchSize": advice.max_batch_size,
        "patch": _build_patch(advice),
        "sentences": list(advice.sentences),
        "tuneFlags": list(advice.tune_flags),
        "traffic": {
            "engines": traffic.engines,
            "requests": traffic.requests,
            "preemptions": traffic.preemptions,
            "kvTokens": traffic.kv_tokens,
            **{
                name: {"mean": each.mean, "p50": each.percentile(50), "p95": each.percentile(95)}
                for name, each in traffic.histograms.items()
                if each.number
            },
        },
    }
    return json.dumps(fields, indent=2)
