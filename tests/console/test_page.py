"""Tests the commands of docs/console.md."""

import shlex
from itertools import pairwise
from pathlib import Path

import yaml
from tests.chart.installation import find, render, render_json
from tests.console.process import ConsoleProcess
from tests.gateway.cluster import Cluster
from tests.kubectl import kubectl

from conveyor_console.settings import PROGRAM as CONSOLE
from e2e.cluster.paths import REPOSITORY

BLOCKS = [block.partition("```")[0] for block in (REPOSITORY / "docs/console.md").read_text().split("```sh\n")[1:]]


def test_the_page_s_commands_name_what_the_chart_installs() -> None:
    install, forward = map(shlex.split, BLOCKS[0].splitlines())
    objects = render(install[-1])
    assert find(objects, "Deployment", "conveyor-console")["spec"]["replicas"] == 1
    assert forward[-2].startswith("service/")
    service = find(objects, "Service", forward[-2].removeprefix("service/"))
    assert forward[-1].endswith(f":{service['spec']['ports'][0]['port']}")


def test_the_page_s_prometheus_is_the_console_s() -> None:
    page = (REPOSITORY / "docs/console.md").read_text()
    values = yaml.safe_load(page.split("```yaml\n")[1].partition("```")[0])
    deployment = find(render_json(**values), "Deployment", "conveyor-console")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert CONSOLE.parse(container["args"], {}).prometheus_url == values["console"]["prometheus"]["url"]
    default = find(render("console.enabled=true"), "Deployment", "conveyor-console")
    assert "--prometheus-url" not in str(default)


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
