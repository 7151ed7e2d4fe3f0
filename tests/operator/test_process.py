"""Tests the operator's process: flags, signals, probes, metrics, and a CRD that does not exist yet."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from tests.operator.api_proxy import SLOW
from tests.operator.kubelet import Kubelet, ready
from tests.operator.stage import Stage, wait_until

from conveyor_api import names
from e2e.cluster.definitions import install_definitions

DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
_PORT = re.compile(r"serving admin_port=(\d+)")


class Process:
    """Runs `python -m conveyor_operator` as a child process and keeps its log."""

    def __init__(self, stage: Stage, *flags: str) -> None:
        command = [sys.executable, "-m", "conveyor_operator", "--host=127.0.0.1", "--admin-port=0"]
        command += [f"--kubeconfig={stage.settings.kubeconfig}", f"--watch-namespaces={stage.space.namespace}"]
        command += ["--metrics-api=false", *flags]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("CONVEYOR_")}
        self.popen = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        self.log: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def port(self) -> int:
        found = wait_until("its port", lambda: _PORT.search("".join(self.log)), 60, lambda: self.log)
        return int(found[1])

    def get(self, path: str) -> tuple[int, str]:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"http://127.0.0.1:{self.port}{path}", timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def end(self, number: signal.Signals) -> int:
        self.popen.send_signal(number)
        code = self.popen.wait(30)
        self._reader.join(10)
        return code

    def close(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
            self.popen.wait(10)
        self._reader.join(10)
        assert self.popen.stderr is not None
        self.popen.stderr.close()

    def _read(self) -> None:
        assert self.popen.stderr is not None
        self.log.extend(iter(self.popen.stderr.readline, ""))


@contextlib.contextmanager
def process(stage: Stage, *flags: str) -> Iterator[Process]:
    running = Process(stage, *flags)
    try:
        yield running
    finally:
        running.close()


@contextlib.contextmanager
def crd_removed(stage: Stage) -> Iterator[None]:
    """Delete two of the CRDs. The third one, of APIKeys, still serves the API group."""
    api = stage.space.api
    try:
        for name in (names.CRD_NAME, names.SERVED_NAME_CRD_NAME):
            api.delete(f"{DEFINITIONS}/{name}")
        for plural in (names.PLURAL, names.SERVED_NAME_PLURAL):
            path = f"/apis/{names.API_VERSION}/{plural}"
            wait_until(f"no {plural}", lambda path=path: not api.reachable(path))
        yield
    finally:
        install_definitions(stage.space.api)


def test_the_process_works_reports_its_health_and_ends_on_sigterm(stage: Stage) -> None:
    with process(stage, "--log-level=debug") as running, Kubelet(stage.space, ready):
        wait_until("it is ready", lambda: running.get("/readyz")[0] == 200)
        assert running.get("/livez") == (200, "alive; waiting for: nothing\n")
        stage.space.make_service()
        stage.space.wait_condition("qwen", "Ready", "True", "Ready", 60)
        metrics = running.get("/metrics")[1]
        assert re.search(r'^conveyor_operator_reconciles_total\{result="done"\} [1-9]', metrics, re.MULTILINE)
        assert re.search(r"^conveyor_operator_reconcile_seconds_count [1-9]", metrics, re.MULTILINE)
        assert "conveyor_operator_queue_depth 0.0" in metrics
        assert 'conveyor_operator_api_calls_total{resource="deployments",status="2xx",verb="patch"}' in metrics
        assert running.end(signal.SIGTERM) == 0
        assert "event=stopped" in running.log[-1]
    assert [line for line in running.log if "level=DEBUG event=planned" in line]
    assert not [line for line in running.log if "Traceback" in line or "Hung tasks" in line]
    applied = [line for line in running.log if "event=apply key=" in line]
    assert applied
    for line in applied:
        assert re.fullmatch(r"time=\S+ level=INFO event=apply key=\S+ kind=\S+ name=\S+ reason=\S+\n", line)


@pytest.mark.slow
def test_a_killed_process_leaves_work_that_the_next_one_finishes(stage: Stage) -> None:
    with Kubelet(stage.space, ready):
        with process(stage) as first:
            wait_until("it is ready", lambda: first.get("/readyz")[0] == 200)
            stage.space.make_service()
            wait_until("the first children", lambda: stage.space.children("qwen"))
            assert first.end(signal.SIGKILL) == -signal.SIGKILL
        with stage.operator():
            stage.space.wait_condition("qwen", "Ready", "True", "Ready", 60)


def test_sigterm_while_kopf_finds_out_what_the_cluster_serves_is_no_failure(stage: Stage) -> None:
    slow = stage.proxy.fail(lambda call: call.resource == "/apis/apps/v1", SLOW)
    with process(stage) as running:
        wait_until("it asks", lambda: slow.hits)
        assert running.end(signal.SIGTERM) == 0, "".join(running.log)


@pytest.mark.slow
def test_before_the_crd_is_there_the_process_lives_is_not_ready_says_why_and_ends_on_sigterm(stage: Stage) -> None:
    with crd_removed(stage), process(stage) as running:
        wait_until("it says so", lambda: "is not installed" in running.get("/livez")[1])
        assert running.get("/livez")[0] == 200
        assert running.get("/readyz") == (503, "the CRD inferenceservices.conveyor.dev is not installed\n")
        assert running.end(signal.SIGTERM) == 0


@pytest.mark.slow
def test_the_operator_begins_when_the_crd_comes(stage: Stage) -> None:
    with crd_removed(stage), stage.operator():
        discovery = f"/apis/{names.API_VERSION}"
        wait_until("it looked", lambda: [call for call in stage.proxy.calls if call.resource == discovery])
        install_definitions(stage.space.api)
        stage.space.make_service()
        stage.space.wait_children("qwen", 60)


def test_without_an_api_server_the_operator_lives_and_begins_when_it_comes(stage: Stage) -> None:
    life = stage.start()
    stage.proxy.severed = True
    stage.space.make_service()
    wait_until("tries", lambda: stage.proxy.num_cut > 3)
    stage.proxy.severed = False
    stage.space.wait_children("qwen", 60)
    life.stop()


def test_it_ends_without_leaving_kopf_a_task_to_wait_for(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level("DEBUG", "kopf"),
        stage.operator(metrics_api=True, system_namespace=stage.space.namespace),
    ):
        stage.space.make_service()
        stage.space.wait_children("qwen")
        wait_until(
            "its own watches", lambda: [c for c in stage.proxy.calls if c.resource in ("secrets", "apiservices")]
        )
    assert "Hung tasks stopping is skipped: no tasks given." in caplog.text


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "conveyor_operator", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--workers=none", "must be a whole number from 1 to 1000, not 'none'"),
        ("--kubeconfig=/nonexistent", "/nonexistent is not a file"),
    ],
)
def test_settings_that_cannot_be_used_end_the_process_with_one_sentence(flag: str, words: str) -> None:
    done = run(flag)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_help_names_every_flag() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert "--engine-image" in done.stdout
    assert "CONVEYOR_OPERATOR_ENGINE_IMAGE" in done.stdout
