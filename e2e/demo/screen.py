"""Prints the demo's story: the table with its legend, what happened, and the next steps. Does not read the cluster."""

import json
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table

from e2e.demo.story import Story, shown
from e2e.load import Load

HPA_SYNC_SECONDS = 5.0  # what `e2e.cluster` sets; Kubernetes' own default is 15
ROWS = 24  # as many as fit a screen
LEGEND = (
    "queue depth: requests that wait for a place in a running batch\n"
    "in flight: all that are not answered yet\n"
    "desired, ready: engine pods that the HPA wants, and that serve\n"
    "TTFT: time to first token, as clients saw it in the last 10 s; slow, because\n"
    "all pods, the cluster and the clients share this machine's processors"
)
GO_ON = """\
export KUBECONFIG={kubeconfig}
{kubectl} get infsvc,hpa,pods
curl {url}/chat/completions -H 'Content-Type: application/json' -d '{body}'
{helm} upgrade conveyor {chart} -n conveyor-system --reset-then-reuse-values --set gateway.replicas=3"""
NEXT = """\
The upgrade keeps the demo's values (the images that were built here) and changes one more.
In a new terminal, eval "$(make -s demo-env)" sets KUBECONFIG, and PATH for kubectl, helm and `kubectl conveyor`.
`kubectl top` has no answer here: it needs metrics-server, which Conveyor does not.
Next: docs/install.md for a cluster with GPUs, docs/autoscaling.md for the numbers above.
make demo-down   # removes the cluster; says what stays on the disk"""


def table(story: Story, title: str) -> RenderableType:
    made = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in (
        "time\ns",
        "queue\ndepth",
        "in\nflight",
        "desired",
        "ready",
        "tokens\n/s",
        "TTFT\nP50, s",
        "P95, s",
    ):
        made.add_column(column, justify="right", no_wrap=True, vertical="bottom")
    made.add_column("", min_width=16)
    for sample in shown(story.samples, ROWS):
        made.add_row(
            f"{sample.at - story.began:.1f}", _known(sample.queue_depth), _known(sample.in_flight),
            str(sample.desired), str(sample.ready), f"{sample.tokens_per_second:.0f}",
            _two_digits(sample.first_token_p50), _two_digits(sample.first_token_p95), sample.event,
            style="bold" if sample.event else None,
        )  # fmt: skip
    return Group(made, LEGEND)


def report(console: Console, story: Story, load: Load) -> bool:
    """Print what happened. Returns whether everything expected happened and nothing failed."""
    console.rule("What happened")
    late = HPA_SYNC_SECONDS + 1
    console.print(
        f"burst -> the HPA wants more pods: {seconds(story.decided)} "
        f"(it looks every {HPA_SYNC_SECONDS:g} s; more than {late:g} s would be late)"
    )
    console.print(f"burst -> first new pod ready:     {seconds(story.first_new_pod)}")
    console.print(f"burst -> three pods ready:        {seconds(story.all_ready)}")
    console.print(f"burst -> back to one pod:         {seconds(story.back_to_one)}")
    console.print(f"requests: {len(load.answers)} answered whole, {len(load.failed)} failed; {load.tokens} tokens")
    for answer in load.failed[:5]:
        console.print(f"  failed: {answer.error}", style="red")
    went = story.decided is not None and story.decided <= late and story.all_ready and story.back_to_one
    return bool(went and not load.failed)


def go_on(console: Console, url: str, kubeconfig: str, kubectl: str, helm: str, chart: Path) -> None:
    """Print commands to paste, and where to read more."""
    console.rule("Go on")
    body = json.dumps({"messages": [{"role": "user", "content": "Tell me about lists."}], "max_tokens": 60})
    print(GO_ON.format(url=url, kubeconfig=kubeconfig, kubectl=kubectl, helm=helm, chart=chart, body=body))
    print(NEXT)


def seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


def _two_digits(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _known(value: float | None) -> str:
    return "?" if value is None else f"{value:g}"
