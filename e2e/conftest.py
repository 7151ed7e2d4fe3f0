"""Fixtures of the stories: a namespace for each, its clean-up, and a dump of all objects if a story fails."""

import os
import re
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e import kube
from e2e.services import CLAIM, provide_demo_model, provide_namespace, remove_demo_model


@pytest.fixture(scope="session", autouse=True)
def _only_our_cluster() -> None:
    kube.require_our_cluster()


@pytest.fixture(scope="session", autouse=True)
def _plugin() -> Iterator[None]:
    """kubectl finds the plugin beside the Python that runs the stories."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        yield


# Stories with these marks run only if `-m` names the mark.
KEPT_APART = ("takes_the_cluster_away", "brings_vllm", "mounts_images")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect stories that run only by their mark. Long stories run first, so that none runs alone at the end."""
    named = config.getoption("markexpr")
    unnamed = [mark for mark in KEPT_APART if mark not in named]
    apart = [item for item in items if any(item.get_closest_marker(mark) for mark in unnamed)]
    config.hook.pytest_deselected(items=apart)
    chosen = (item for item in items if item not in apart)
    items[:] = sorted(chosen, key=lambda item: item.get_closest_marker("long") is None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.when == "call":
        for node in item.listchain():
            node.stash[FAILED] = node.stash.get(FAILED, False) or report.failed
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what the stories have measured for the documentation."""
    for report in terminalreporter.stats.get("passed", []):
        for name, value in report.user_properties:
            if report.when == "call" and name == "figure":
                terminalreporter.line(f"figure: {value}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Succeed even if the marks of this run deselect all collected stories."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and reporter and reporter.stats.get("deselected"):
        session.exitstatus = pytest.ExitCode.OK


FAILED = pytest.StashKey[bool]()


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> Iterator[str]:
    """A fresh namespace with the demo model's claim. It is deleted afterwards, with everything in it."""
    yield from _provide_namespace(request)


@pytest.fixture(scope="module")
def shared_namespace(request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace like `namespace`, for all stories of a file."""
    yield from _provide_namespace(request)


def _provide_namespace(request: pytest.FixtureRequest) -> Iterator[str]:
    story = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower())[:30].strip("-")
    name = f"{story}-{uuid.uuid4().hex[:5]}"
    try:
        provide_namespace(name)
        provide_demo_model(name)
        yield name
    finally:
        if request.node.stash.get(FAILED, True):
            dump(name)
        # Not waited for: the namespace controller sleeps for half the pods' grace period before it looks again.
        kube.kubectl("delete", "infsvc", "--all", "-n", name, "--timeout=60s")
        kube.kubectl("delete", "namespace", name, "--wait=false")
        remove_demo_model(name)


@pytest.fixture
def default(request: pytest.FixtureRequest) -> Iterator[str]:
    """The namespace `default`, for commands that people paste. Everything that a story creates in it is deleted."""
    try:
        yield "default"
    finally:
        if request.node.stash.get(FAILED, True):
            dump("default")
        kube.kubectl("delete", "infsvc", "--all", "-n", "default", "--timeout=120s")
        kube.kubectl("delete", "pvc", CLAIM, "-n", "default", "--ignore-not-found", "--timeout=120s")
        remove_demo_model("default")


def dump(namespace: str) -> None:
    """Print pods, events, resources and logs, as a person would ask for them."""
    for where in (namespace, kube.SYSTEM_NAMESPACE):
        commands = [
            ("get", "infsvc,deploy,rs,pods,hpa,svc,endpointslices", "-o", "wide"),
            ("describe", "infsvc"),
            ("describe", "pods"),
            ("get", "events", "--sort-by=.lastTimestamp"),
        ]
        for command in commands:
            _show(*command, "-n", where)
        for pod in kube.list_("pods", where):
            name, status = pod["metadata"]["name"], pod.get("status") or {}
            _show("logs", name, "-n", where, "--all-containers", "--tail=200")
            for container in status.get("initContainerStatuses", []) + status.get("containerStatuses", []):
                if container["restartCount"]:
                    _show("logs", name, "-n", where, "-c", container["name"], "--previous", "--tail=200")


def _show(*command: str) -> None:
    print(f"--- kubectl {' '.join(command)}", file=sys.stderr)
    try:
        print(kube.kubectl(*command), file=sys.stderr)
    except kube.CommandFailed as error:
        print(error, file=sys.stderr)
