"""`python -m e2e.demo [TASK]`: runs the demo; see the package."""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable
from typing import Any

from openai import OpenAI
from rich.console import Console
from rich.live import Live

from e2e import kube
from e2e.cluster import programs
from e2e.cluster.paths import REPOSITORY
from e2e.demo import screen, tasks
from e2e.demo.picture import build_svg
from e2e.demo.story import WANTED_REPLICAS, Sample, Story, add_client_side
from e2e.gateway import service_url
from e2e.load import Load, running_load
from e2e.services import provide_demo_model

NAMESPACE = "default"
NAME = "demo"
CONCURRENCY = 10  # one pod runs 4 at a time and 6 wait: more pods are wanted than maxReplicas allows
TITLE = f"{NAMESPACE}/{NAME}: {CONCURRENCY} clients, batches of 4, at most {WANTED_REPLICAS} pods"
BURST_SECONDS_MAX = 240
PICTURE = REPOSITORY / "build" / "demo.svg"
console = Console()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m e2e.demo", description=__doc__)
    parser.add_argument("task", nargs="?", choices=tasks.TASKS, help="another task than generating text")
    task: str | None = parser.parse_args().task
    kube.require_our_cluster()
    if task is None:
        return generate()
    tasks.show(console, task, NAMESPACE, wait_for)
    return 0


def generate() -> int:
    console.rule("1. Apply examples/quickstart.yaml")
    provide_demo_model(NAMESPACE)
    started = time.monotonic()
    kube.kubectl("apply", "--server-side", "-n", NAMESPACE, "-f", str(kube.MANIFESTS / "quickstart.yaml"))
    wait_for(NAME, "Ready", started)
    console.print(kube.kubectl("get", "infsvc", NAME, "-n", NAMESPACE).rstrip(), highlight=False)
    url = service_url(NAME, NAMESPACE)
    console.rule("2. Ask it, with the openai client")
    chat(url)
    console.rule("3. A burst: the queue grows, the HPA adds pods, then takes them away")
    wait_for(NAME, "ScalingReady", started)  # the HPA of a new cluster may need half a minute to know the resource
    story, load = asyncio.run(burst(url))
    succeeded = screen.report(console, story, load)
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(build_svg(story, TITLE), encoding="utf-8")
    console.print(f"the burst as a picture: {PICTURE.relative_to(REPOSITORY)}", highlight=False)
    chart = REPOSITORY / "charts" / "conveyor"
    screen.go_on(console, url, kube.kubeconfig_path(), programs.path("kubectl"), programs.path("helm"), chart)
    return 0 if succeeded else 1


def wait_for(service: str, kind: str, started: float) -> None:
    """Wait until the service has this condition. Prints each reason why it has not, as `kubectl describe` would."""
    text = ""

    def is_true() -> bool:
        nonlocal text
        found = kube.condition(kube.get("infsvc", service, NAMESPACE), kind)
        words = f"{found.get('reason', 'Pending')}: {found.get('message', 'the operator has not seen it yet')}"
        if words != text:
            console.print(f"{time.monotonic() - started:3.0f} s  {words}", highlight=False)
            text = words
        return found.get("status") == "True"

    kube.wait_until(f"the service is {kind}", is_true)


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
    """Run a load until the service has three ready pods, and then wait until it is back at one."""
    body: dict[str, Any] = {"model": NAME, "max_tokens": 160, "min_tokens": 120, "temperature": 0.8}
    story = Story(began=time.monotonic())
    with Live(console=console, refresh_per_second=4) as live:
        async with running_load(url, body, CONCURRENCY) as load:
            await _watch(story, load, live, lambda: story.all_ready is not None, BURST_SECONDS_MAX)
            steady_until = time.monotonic() + 10  # a look at three pods at work
            await _watch(story, load, live, lambda: time.monotonic() > steady_until, 20)
        story.burst_ended = time.monotonic() - story.began
        await _watch(story, load, live, lambda: story.back_to_one is not None, 180)
    if not console.is_terminal:
        console.print()  # in a file, the last line of the table has no newline
    return story, load


async def _watch(story: Story, load: Load, live: Live, done: Callable[[], bool], seconds_max: float) -> None:
    end = time.monotonic() + seconds_max
    while not done() and time.monotonic() < end:
        sample = await asyncio.to_thread(read_sample)
        add_client_side(sample, load)
        story.note(sample)
        live.update(screen.table(story, TITLE))
        await asyncio.sleep(max(0.0, sample.at + 0.5 - time.monotonic()))


def read_sample() -> Sample:
    """Read the metrics API as the HPA does, and the HPA and the Deployment as kubectl does."""
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


if __name__ == "__main__":
    with kube.errors_in_words():
        try:
            sys.exit(main())
        except KeyboardInterrupt:
            sys.exit("\nStopped. The cluster and the service are up: make demo goes on, make demo-down removes them.")
