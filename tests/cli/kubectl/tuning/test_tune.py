"""Tests `kubectl conveyor tune` of docs/tuning.md: what it measures, and that it restores everything."""

import http.server
import json
import re
import signal
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import httpx
import pytest
from tests.cli.kubectl.tuning.conftest import EnginePods
from tests.engine.processes import REAL
from tests.gateway.cluster import make_endpoint, make_slice, own_address
from tests.gateway.process import GatewayProcess
from tests.operator.stage import Space, wait_until

from conveyor_api import names
from conveyor_kubectl.cluster import Cluster
from conveyor_kubectl.command import main
from e2e.cluster.certificates import Authority
from e2e.cluster.control_plane import ControlPlane
from e2e.cluster.paths import REPOSITORY
from e2e.cluster.tools import binary

Json = dict[str, Any]
BATCHING = {"mode": "Continuous", "maxBatchSize": 2}
SPEC = {"batching": BATCHING, "kvCache": {"blockBudget": 1024}, "engine": {"device": "Auto", "maxModelLen": 512}}
SMALL = ["--input-tokens=16", "--output-tokens=4", "--max-batch-size=4"]
QUICK = [*SMALL, "--rate=4", "--seconds=2", "--objective=latency=30s"]
LONG = [*SMALL, "--rate=2", "--seconds=10", "--objective=latency=30s"]  # the second setting is still measured

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Refusing(http.server.BaseHTTPRequestHandler):
    """Answers as no other program does."""

    def do_POST(self) -> None:
        self.send_response(418)
        self.end_headers()
        self.wfile.write(b"by TLS")


class Tune:
    """Runs the command for a namespace and its gateway."""

    def __init__(self, space: Space, kubeconfig: Path, gateway: GatewayProcess) -> None:
        self._space = space
        self._flags = ["qwen", "-n", space.namespace, f"--kubeconfig={kubeconfig}"]
        self._url = [f"--url={gateway.url}"]
        self._started: list[subprocess.Popen[str]] = []

    def arguments(self, *flags: str) -> list[str]:
        way = [] if any(flag.startswith("--system-namespace") for flag in flags) else self._url
        return ["tune", *self._flags, *way, *flags]

    def run(self, *flags: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run the command with kubectl, which finds the plugin; in `folder`, if it is given."""
        command = [str(binary("kubectl")), "conveyor", *self.arguments(*flags)]
        return subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=folder)

    def start(self, *flags: str) -> "subprocess.Popen[str]":
        """Start the command, and wait until requests are sent with the second setting."""
        command = [sys.executable, "-m", "conveyor_kubectl", *self.arguments(*flags)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self._started.append(process)
        assert process.stderr is not None
        for line in process.stderr:
            if "maxBatchSize 4: 2 requests/s" in line:
                return process
        raise AssertionError(f"it ended before: {process.wait()}")

    def close(self) -> None:
        """Kill the processes that a failed test has left."""
        for process in self._started:
            with process:
                process.kill()


@pytest.fixture
def tune(space: Space, control_plane: ControlPlane, gateway: GatewayProcess) -> Iterator[Tune]:
    with closing(Tune(space, control_plane.kubeconfig, gateway)) as tune:
        yield tune


def make_ready(space: Space, **spec: Any) -> Json:
    """Create the service in its state before `tune`."""
    space.make_service(**{**SPEC, **spec})
    space.wait_condition("qwen", "WorkloadReady", "True", "ReplicasReady")
    space.wait_condition("qwen", "Progressing", "False", "UpToDate")
    return space.need("InferenceService", "qwen")


def owners(body: Json) -> list[tuple[str, str]]:
    """Return the owners of the parts of the spec."""
    entries = [entry for entry in body["metadata"]["managedFields"] if "subresource" not in entry]
    return [(entry["manager"], json.dumps(entry["fieldsV1"], sort_keys=True)) for entry in entries]


def check_as_before(space: Space, before: Json) -> None:
    now = space.need("InferenceService", "qwen")
    assert now["spec"] == before["spec"]
    assert names.TUNE_ANNOTATION not in now["metadata"].get("annotations", {})
    assert owners(now) == owners(before)
    assert space.get("InferenceService", "qwen-tune") is None


def sizes(pods: EnginePods) -> list[int]:
    return [config["max_num_seqs"] for config in pods.configs]


def publish(space: Space, gateway_port: int, port_name: str = "http", port: int = names.GATEWAY_SERVICE_PORT) -> None:
    """Publish the gateway's Service in the services' namespace. The API server's proxy sends only to pods."""
    name, address = names.GATEWAY_SERVICE, own_address()
    space.create("Pod", {"metadata": {"name": name}, "spec": {"containers": [{"name": "gateway", "image": "example"}]}})
    space.patch("Pod", name, {"status": {"podIP": address, "podIPs": [{"ip": address}]}}, "status")
    ports = [{"name": port_name, "port": port, "targetPort": gateway_port}]
    space.create("Service", {"metadata": {"name": name}, "spec": {"ports": ports}})
    endpoint = {**make_endpoint(address), "targetRef": {"kind": "Pod", "name": name, "namespace": space.namespace}}
    body = make_slice(name, space.namespace, "", gateway_port, endpoint)
    body["ports"][0]["name"] = port_name
    body["metadata"]["labels"] = {"kubernetes.io/service-name": name}
    space.create("EndpointSlice", body)


def test_the_way_through_the_proxy_leads_to_a_gateway_that_serves_tls(
    space: Space, control_plane: ControlPlane, tmp_path: Path
) -> None:
    pair = Authority(tmp_path, "ca").issue("gateway", "gateway", names=("conveyor-gateway.conveyor-system.svc",))
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(pair.certificate, pair.key)
    with http.server.ThreadingHTTPServer(("0.0.0.0", 0), Refusing) as server:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        publish(space, server.server_port, "https", names.GATEWAY_TLS_SERVICE_PORT)
        cluster = Cluster(str(control_plane.kubeconfig), None)
        url = cluster.find_service_url(
            space.namespace, cluster.find_proxied_name(space.namespace, names.GATEWAY_SERVICE)
        )
        answer = httpx.post(f"{url}/v1/completions", verify=cluster.build_tls(), headers=cluster.build_headers())
        server.shutdown()
    assert (answer.status_code, answer.text) == (418, "by TLS")


def test_a_live_service_is_measured_with_each_setting_and_put_back(
    space: Space, pods: EnginePods, tune: Tune, gateway: GatewayProcess, tmp_path: Path
) -> None:
    pods.program = REAL
    publish(space, gateway.port)
    before = make_ready(space)
    svg, way = f"--svg={tmp_path / 'curve.svg'}", f"--system-namespace={space.namespace}"
    done = tune.run(*QUICK, "-o", "json", svg, way)
    assert done.returncode == 0, done.stdout + done.stderr
    check_as_before(space, before)
    document = json.loads(done.stdout)
    assert document["current"] == {"maxBatchSize": 2}
    assert [each["batching"]["maxBatchSize"] for each in document["candidates"]] == [2, 4]
    for candidate in document["candidates"]:
        (trial,) = candidate["trials"]
        assert trial["requests"] > 4
        assert (trial["failed"], trial["misses"]) == (0, [])
        assert trial["outputTokensPerSecond"] > 4
        assert 0 < trial["timeToFirstToken"]["p50"] <= trial["latency"]["p50"]
    assert ElementTree.parse(tmp_path / "curve.svg").getroot() is not None
    wait_until("the old setting runs again", lambda: sizes(pods) == [2, 4, 2], 60, lambda: sizes(pods))
    assert "each setting starts the engines anew" in done.stderr, "the cost is told first"


def test_a_copy_is_measured_in_place_of_the_service(space: Space, pods: EnginePods, tune: Tune) -> None:
    before = make_ready(space, autoscaling={"maxReplicas": 3}, listed=True)
    process = tune.start("--replica", *LONG)
    copy = space.need("InferenceService", "qwen-tune")
    assert copy["metadata"]["labels"] == {names.TUNE_LABEL: "qwen"}
    assert copy["metadata"]["ownerReferences"][0]["uid"] == before["metadata"]["uid"]
    assert "autoscaling" not in copy["spec"]
    assert (copy["spec"]["replicas"], copy["spec"]["listed"], copy["spec"]["model"]["name"]) == (1, False, "qwen")
    now = space.need("InferenceService", "qwen")
    assert now["metadata"]["generation"] == before["metadata"]["generation"]
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=200)
    assert process.returncode == 130
    assert re.search(r"^a +maxBatchSize 2 ", out, re.MULTILINE), "what was measured is shown"
    assert "Not all settings were measured, so none is recommended." in out
    check_as_before(space, before)
    assert sizes(pods) == [2, 2, 4]


def test_a_signal_puts_everything_back(space: Space, pods: EnginePods, tune: Tune) -> None:
    before = make_ready(space)
    process = tune.start(*LONG)
    assert space.need("InferenceService", "qwen")["spec"]["batching"]["maxBatchSize"] == 4
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 143
    assert "spec.batching of qwen is as it was" in errors
    check_as_before(space, before)


@pytest.mark.nightly
def test_what_a_killed_tune_left_is_put_back_by_the_next_command(space: Space, pods: EnginePods, tune: Tune) -> None:
    before = make_ready(space)
    process = tune.start(*LONG)
    process.kill()
    process.communicate()
    assert space.need("InferenceService", "qwen")["spec"] != before["spec"]
    wait_until("it runs", lambda: space.condition("qwen", "Progressing").get("reason") == "UpToDate")
    refused = tune.run(*QUICK)
    assert refused.returncode == 1
    assert "`kubectl conveyor tune qwen --restore` puts it back" in refused.stderr
    assert tune.run("--restore").stdout == "spec.batching of qwen is as it was\n"
    assert space.need("InferenceService", "qwen")["spec"] == before["spec"]
    assert tune.run("--restore").stdout == "there is nothing to put back for qwen\n"


@pytest.mark.nightly
def test_a_copy_that_a_killed_tune_left_is_deleted_by_the_next_command(
    space: Space, pods: EnginePods, tune: Tune
) -> None:
    before = make_ready(space)
    process = tune.start("--replica", *LONG)
    process.kill()
    process.communicate()
    refused = tune.run("--replica", *QUICK)
    assert refused.returncode == 1
    assert "there is a copy qwen-tune already" in refused.stderr
    assert tune.run("--restore").stdout == "the copy qwen-tune is deleted\n"
    check_as_before(space, before)


def test_a_setting_that_does_not_start_is_reported_and_put_back(space: Space, pods: EnginePods, tune: Tune) -> None:
    before = make_ready(space)
    done = tune.run(*QUICK, "--start-timeout=1ms")
    assert "does not run: not ready after 0 s" in done.stdout, done.stderr
    check_as_before(space, before)


def test_somebody_else_s_change_is_left_as_it_is(space: Space, pods: EnginePods, tune: Tune) -> None:
    make_ready(space)
    process = tune.start(*LONG)
    space.edit("qwen", batching={"maxBatchSize": 7})
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=200)
    assert "somebody else changed spec.batching of qwen: it is left as it is now" in errors
    now = space.need("InferenceService", "qwen")
    assert now["spec"]["batching"]["maxBatchSize"] == 7
    assert names.TUNE_ANNOTATION not in now["metadata"].get("annotations", {})


def test_a_dry_run_reports_the_settings_and_the_cost_and_writes_nothing(
    space: Space, pods: EnginePods, tune: Tune
) -> None:
    before = make_ready(space)
    done = tune.run("--dry-run", "--objective=ttft=500ms,itl=40ms", "--max-batch-size=1,4")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "measures qwen itself, first with maxBatchSize 2, then with maxBatchSize 1, 4\n" in done.stdout
    assert "timeToFirstToken 500 ms, interTokenLatency 40 ms" in done.stdout
    assert "a rollout for each of 2 settings, and one that puts spec.batching back" in done.stdout
    assert re.search(r"about \d+ minutes in all", done.stdout)
    now = space.need("InferenceService", "qwen")
    assert now["metadata"]["generation"] == before["metadata"]["generation"]
    assert space.get("InferenceService", "qwen-tune") is None


def test_what_cannot_be_tuned_is_one_sentence(
    space: Space, pods: EnginePods, tune: Tune, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def refuse(*flags: str) -> str:
        assert main(tune.arguments(*flags)) == 1
        (line,) = capsys.readouterr().err.splitlines()
        return line.removeprefix("kubectl conveyor: ")

    assert "there is no InferenceService qwen" in refuse(*QUICK)
    space.make_service(**{**SPEC, "replicas": 0})
    space.wait_observed("qwen")
    assert refuse(*QUICK) == "no engine of qwen is ready, so there is nothing to measure; --replica starts one"
    assert refuse(*SMALL).startswith("--objective is missing: for example")
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 1}\n')
    assert refuse("--replica", *QUICK, f"--trace={trace}") == f"no tune: {trace}: line 1: 'input_length' is missing"
    space.edit("qwen", replicas=None, autoscaling={"maxReplicas": 3})
    assert refuse(*QUICK).startswith("qwen is autoscaled")
    space.edit("qwen", autoscaling=None, batching={"mode": "None", "maxBatchSize": None})
    assert refuse("--replica", *QUICK).startswith("no tune: mode None runs one request at a time")


DOCUMENTED = re.findall(r"```sh\n(kubectl conveyor .*)\n```", (REPOSITORY / "docs/tuning.md").read_text())


def test_the_commands_of_the_page_do_what_they_say(space: Space, pods: EnginePods, tune: Tune, tmp_path: Path) -> None:
    """The sizes are small: one more setting, and short requests."""
    rows = [{"timestamp": 200 * number, "input_length": 16, "output_length": 4} for number in range(20)]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    make_ready(space)
    commands = [line for line in DOCUMENTED if line.startswith("kubectl conveyor tune qwen ")]
    assert len(commands) == 4
    for command in commands:
        words = command.split()[4:]
        small = [] if "--restore" in words else [*SMALL, "--rate=4", "--seconds=1", "--objective=latency=30s"]
        done = tune.run(*words, *small, folder=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout
