"""The main job, shown: an InferenceService, one chat, a burst, and the service going 1 -> 3 -> 1 because of its queue.

`python -m e2e.demo`; `make demo` brings up all that it needs. Leaves the cluster and the service up.
"""

import asyncio
import json
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from openai import OpenAI
from rich.console import Console
from rich.live import Live
from rich.table import Table

from e2e import kube
from e2e.cluster.tools import binary
from e2e.gateway import service_url
from e2e.load import Load, running_load
from e2e.services import provide_demo_model

NAMESPACE = "default"
NAME = "demo"
WANTED_REPLICAS = 3
CONCURRENCY = 10  # ceil(10 / (0.8 x 4)) = 4 wanted, capped at maxReplicas 3
BURST_SECONDS_MAX = 240
HPA_SYNC_SECONDS = 5.0  # what `e2e.cluster` sets; Kubernetes' own default is 15
console = Console()


@dataclass(slots=True)
class Sample:
    """One reading of the cluster's own figures; None where it does not know."""

    at: float
    queue_depth: float | None
    in_flight: float | None
    desired: int
    ready: int
    tokens_per_second: float = 0.0
    first_token_p50: float | None = None
    first_token_p95: float | None = None


@dataclass(slots=True)
class Story:
    """When what happened, in seconds since the burst began."""

    began: float
    decided: float | None = None
    first_new_pod: float | None = None
    all_ready: float | None = None
    back_to_one: float | None = None
    samples: list[Sample] = field(default_factory=list)

    def note(self, sample: Sample) -> None:
        self.samples.append(sample)
        since = sample.at - self.began
        if sample.desired > 1 and self.decided is None:
            self.decided = since
        if sample.ready > 1 and self.first_new_pod is None:
            self.first_new_pod = since
        if sample.ready >= WANTED_REPLICAS and self.all_ready is None:
            self.all_ready = since
        if self.all_ready is not None and sample.desired == sample.ready == 1:
            self.back_to_one = since


def main() -> int:
    kube.require_our_cluster()
    console.rule("1. Apply e2e/manifests/quickstart.yaml")
    provide_demo_model(NAMESPACE)
    started = time.monotonic()
    kube.kubectl("apply", "--server-side", "-n", NAMESPACE, "-f", str(kube.MANIFESTS / "quickstart.yaml"))
    kube.wait_ready(NAME, NAMESPACE)
    console.print(kube.kubectl("get", "infsvc", NAME, "-n", NAMESPACE).rstrip(), highlight=False)
    console.print(f"Ready after {time.monotonic() - started:.0f} s.")
    url = service_url(NAME, NAMESPACE)
    console.rule("2. Ask it, with the openai client")
    chat(url)
    console.rule("3. A burst: the queue grows, the HPA adds pods, then takes them away")
    story, load = asyncio.run(burst(url))
    return report(story, load, url)


def chat(url: str) -> None:
    question = "How do I use the with statement?"
    console.print(f"> {question}", style="bold")
    client = OpenAI(base_url=url, api_key="none")
    stream = client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": question}],
        max_tokens=120,
        temperature=0.7,
        seed=1,
        stream=True,
    )
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            sys.stdout.write(chunk.choices[0].delta.content)
            sys.stdout.flush()
    print()


async def burst(url: str) -> tuple[Story, Load]:
    """Load until the service has three ready pods, then wait until it is back at one."""
    body: dict[str, Any] = {"model": NAME, "max_tokens": 160, "min_tokens": 120, "temperature": 0.8}
    story = Story(began=time.monotonic())
    with Live(console=console, refresh_per_second=4) as live:
        async with running_load(url, body, CONCURRENCY) as load:
            await _watch(story, load, live, lambda: story.all_ready is not None, BURST_SECONDS_MAX)
            steady_until = time.monotonic() + 10  # a look at three pods at work
            await _watch(story, load, live, lambda: time.monotonic() > steady_until, 20)
        await _watch(story, load, live, lambda: story.back_to_one is not None, 180)
    return story, load


async def _watch(story: Story, load: Load, live: Live, done: Any, seconds_max: float) -> None:
    end = time.monotonic() + seconds_max
    while not done() and time.monotonic() < end:
        sample = await asyncio.to_thread(read_sample)
        _add_client_side(sample, load)
        story.note(sample)
        live.update(_table(story, load))
        await asyncio.sleep(max(0.0, sample.at + 0.5 - time.monotonic()))


def read_sample() -> Sample:
    """Ask the metrics API and the Deployment, as the HPA and kubectl do."""
    hpa = kube.get("hpa", f"{NAME}-engine", NAMESPACE) or {}
    deployment = kube.get("deployment", f"{NAME}-engine", NAMESPACE) or {}
    return Sample(
        at=time.monotonic(),
        queue_depth=_metric("inference_queue_depth"),
        in_flight=_metric("inference_in_flight"),
        desired=(hpa.get("status") or {}).get("desiredReplicas", 0),
        ready=(deployment.get("status") or {}).get("readyReplicas", 0),
    )


def _metric(metric: str) -> float | None:
    path = f"/apis/custom.metrics.k8s.io/v1beta2/namespaces/{NAMESPACE}/inferenceservices.conveyor.dev/{NAME}/{metric}"
    try:
        value = str(json.loads(kube.kubectl("get", "--raw", path))["items"][0]["value"])
    except kube.CommandFailed:
        return None
    return float(value[:-1]) / 1000 if value.endswith("m") else float(value)


def _table(story: Story, load: Load) -> Table:
    table = Table(title=f"{NAMESPACE}/{NAME}: {CONCURRENCY} clients, batches of 4, at most {WANTED_REPLICAS} pods")
    for column in ("time", "queue depth", "in flight", "desired", "ready"):
        table.add_column(column, justify="right")
    for column in ("tokens/s", "TTFT P50", "TTFT P95"):
        table.add_column(column, justify="right")
    for sample in _thinned(story.samples):
        table.add_row(
            f"{sample.at - story.began:.1f} s", _shown(sample.queue_depth), _shown(sample.in_flight),
            str(sample.desired), str(sample.ready), f"{sample.tokens_per_second:.0f}",
            _seconds(sample.first_token_p50), _seconds(sample.first_token_p95),
        )  # fmt: skip
    return table


def report(story: Story, load: Load, url: str) -> int:
    """Say what happened and how to go on; 0 only if all of it happened and nothing failed."""
    console.rule("What happened")
    bar = f"bar: {HPA_SYNC_SECONDS + 1:g} s, the HPA syncs every {HPA_SYNC_SECONDS:g} s"
    console.print(f"burst -> higher desiredReplicas: {_seconds(story.decided)} ({bar})")
    console.print(f"burst -> first new pod ready:    {_seconds(story.first_new_pod)}")
    console.print(f"burst -> three pods ready:       {_seconds(story.all_ready)}")
    console.print(f"burst -> back to one pod:        {_seconds(story.back_to_one)}")
    console.print(f"requests: {len(load.answers)} answered whole, {len(load.failed)} failed; {load.tokens} tokens")
    for answer in load.failed[:5]:
        console.print(f"  failed: {answer.error}", style="red")
    console.rule("Go on")
    body = json.dumps({"messages": [{"role": "user", "content": "Tell me about lists."}], "max_tokens": 60})
    print(f"export KUBECONFIG={kube.kubeconfig_path()}")
    print(f"{binary('kubectl')} get infsvc,hpa,pods")
    print(f"curl {url}/chat/completions -H 'Content-Type: application/json' -d '{body}'")
    print("make demo-down   # removes every trace")
    went = story.decided is not None and story.decided <= HPA_SYNC_SECONDS + 1 and story.all_ready and story.back_to_one
    return 0 if went and not load.failed else 1


def _thinned(samples: list[Sample], rows: int = 24) -> list[Sample]:
    """The rows that changed something, and the newest; as many as fit a screen."""
    kept = [
        s for before, s in zip([None, *samples[:-1]], samples, strict=True)
        if before is None or (s.desired, s.ready) != (before.desired, before.ready) or s is samples[-1]
    ]  # fmt: skip
    step = max(1, len(samples) // rows)
    kept = sorted({id(s): s for s in kept + samples[::step]}.values(), key=lambda s: s.at)
    return kept[-rows:]


def _add_client_side(sample: Sample, load: Load, window_seconds: float = 10.0) -> None:
    """What the clients saw in the last seconds: tokens spread evenly over each answer's time, and first tokens."""
    since = sample.at - window_seconds
    tokens = 0.0
    first: list[float] = []
    for answer in load.answers:
        if answer.first_token_seconds is None:
            continue
        begin = answer.started + answer.first_token_seconds
        end = answer.finished or time.monotonic()
        overlap = min(end, sample.at) - max(begin, since)
        if overlap > 0:
            tokens += answer.tokens * min(1.0, overlap / max(end - begin, 1e-6))
        if since <= begin <= sample.at:
            first.append(answer.first_token_seconds)
    first.sort()
    sample.tokens_per_second = tokens / window_seconds
    sample.first_token_p50, sample.first_token_p95 = _percentile(first, 0.5), _percentile(first, 0.95)


def _percentile(values: list[float], share: float) -> float | None:
    return values[min(len(values) - 1, int(share * len(values)))] if values else None


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


def _shown(value: float | None) -> str:
    return "?" if value is None else f"{value:g}"


if __name__ == "__main__":
    with kube.errors_in_words():
        sys.exit(main())
