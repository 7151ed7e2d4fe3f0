"""Tests the commands of docs/console.md."""

import shlex
from itertools import pairwise
from pathlib import Path

from tests.chart.installation import find, render
from tests.console.process import ConsoleProcess
from tests.gateway.cluster import Cluster
from tests.kubectl import kubectl

from e2e.cluster.paths import REPOSITORY

BLOCKS = [block.partition("```")[0] for block in (REPOSITORY / "docs/console.md").read_text().split("```sh\n")[1:]]


def test_the_page_s_commands_name_what_the_chart_installs() -> None:
    install, forward = map(shlex.split, BLOCKS[0].splitlines())
    objects = render(install[-1])
    assert find(objects, "Deployment", "conveyor-console")["spec"]["replicas"] == 1
    assert forward[-2].startswith("service/")
    service = find(objects, "Service", forward[-2].removeprefix("service/"))
    assert forward[-1].endswith(f":{service['spec']['ports'][0]['port']}")


def test_the_page_s_account_sees_its_namespace(console: ConsoleProcess, kubeconfig: Path, cluster: Cluster) -> None:
    cluster.apply_service("qwen")
    commands = [shlex.split(line.replace("team-a", cluster.namespace)) for line in BLOCKS[1].splitlines()]
    *_, token = [kubectl(kubeconfig, cluster.namespace, *command[3:]) for command in commands]
    console.wait_for("qwen", token.strip())


def test_the_page_s_value_adds_the_playground() -> None:
    command = shlex.split(BLOCKS[2])
    values = [value for flag, value in pairwise(command) if flag == "--set"]
    (container,) = find(render(*values), "Deployment", "conveyor-console")["spec"]["template"]["spec"]["containers"]
    assert any(each.startswith("--playground-url=http") for each in container["args"])
