"""Renders and installs the chart with Helm, on a real control plane that logs every API call.

Used by the tests of this folder; the fixtures are in `conftest`.
"""

import base64
import json
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from tests.operator.kubelet import Kubelet, ready
from tests.operator.stage import Space, wait_until

import conveyor_console.settings
import conveyor_gateway.settings
import conveyor_metrics.settings
import conveyor_operator.settings
from conveyor_api.names import METRICS_TLS_SECRET, METRICS_VERSIONS, SYSTEM_NAMESPACE
from e2e.cluster.api import Api
from e2e.cluster.control_plane import ControlPlane
from e2e.cluster.paths import REPOSITORY
from e2e.cluster.tools import binary, search_path

Json = dict[str, Any]

CHART = REPOSITORY / "charts" / "conveyor"
RELEASE = "conveyor"
API_SERVICES_PATH = "/apis/apiregistration.k8s.io/v1/apiservices"
PROCESSES = ("operator", "gateway", "metrics")  # that the chart installs by default
PARSERS: dict[str, Callable[[Sequence[str], dict[str, str]], object]] = {
    "conveyor-operator": conveyor_operator.settings.PROGRAM.parse,
    "conveyor-console": conveyor_console.settings.PROGRAM.parse,
    "conveyor-gateway": conveyor_gateway.settings.PROGRAM.parse,
    "conveyor-metrics": conveyor_metrics.settings.PROGRAM.parse,
}

# Who did what, without bodies; the control plane's own work is left out.
_AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {"level": "Metadata", "userGroups": [f"system:serviceaccounts:{SYSTEM_NAMESPACE}"]},
        {"level": "None"},
    ],
}


class AuditedControlPlane(ControlPlane):
    """Writes the calls of the system namespace's ServiceAccounts to `audit_log` as JSON lines.

    OwnerReferencesPermissionEnforcement is on, as on OpenShift: it asks for the right to set `blockOwnerDeletion`.
    """

    @property
    def audit_log(self) -> Path:
        return self.folder / "audit.log"

    def read_audit(self, user: str) -> list[Json]:
        """Return the completed calls of a user, in order."""
        whole = self.audit_log.read_text().rpartition("\n")[0]  # behind it is what the API server writes now
        events = [json.loads(line) for line in whole.splitlines()]
        return [event for event in events if event["user"]["username"] == user]

    def _api_server_command(self) -> list[str | Path]:
        policy = self.folder / "audit-policy.json"
        policy.write_text(json.dumps(_AUDIT_POLICY))
        return [
            *super()._api_server_command(),
            f"--audit-policy-file={policy}",
            f"--audit-log-path={self.audit_log}",
            "--audit-log-mode=blocking",
            "--enable-admission-plugins=OwnerReferencesPermissionEnforcement",
        ]


class CommandFailed(Exception):
    """A command ended with an error; the message is what it printed."""


class HelmFailed(CommandFailed):
    """Helm ended with an error."""


def helm(*arguments: str | Path, kubeconfig: Path | None = None) -> str:
    """Run Helm. Without a kubeconfig it has no cluster."""
    # It ends before collecting its garbage pays: a tenth of its time.
    environment = {"HOME": str(REPOSITORY), "KUBECONFIG": str(kubeconfig or "/nonexistent"), "GOGC": "off"}
    command = [str(part) for part in (binary("helm"), *arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    if done.returncode != 0:
        raise HelmFailed(done.stdout + done.stderr)
    return done.stdout


class Release:
    """A release of the chart in a cluster."""

    def __init__(self, plane: AuditedControlPlane) -> None:
        self.plane = plane
        self.api = Api(plane.kubeconfig)

    def upgrade(self, *values: str, chart: Path = CHART, more: Sequence[str] = ()) -> str:
        """Upgrade the release and return Helm's output. values: as for `--set`; more: other flags of Helm."""
        options = [*more, *(option for value in values for option in ("--set", value))]
        command = ("upgrade", "--install", RELEASE, chart, "--namespace", SYSTEM_NAMESPACE)
        return helm(*command, *options, kubeconfig=self.plane.kubeconfig)

    def shell(self, command: str, folder: Path = REPOSITORY) -> str:
        """Run a shell command with kubectl and helm on the PATH. Raises CommandFailed with its output."""
        environment = {"HOME": str(self.plane.folder), "KUBECONFIG": str(self.plane.kubeconfig), "PATH": search_path()}
        shell = ["bash", "-euo", "pipefail", "-c", command]
        done = subprocess.run(shell, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
        if done.returncode != 0:
            raise CommandFailed(f"{command}\n{done.stdout}{done.stderr}")
        return done.stdout

    def uninstall(self) -> None:
        helm("uninstall", RELEASE, "--namespace", SYSTEM_NAMESPACE, kubeconfig=self.plane.kubeconfig)

    def api_service(self, version: str) -> Json | None:
        name = f"{version}.custom.metrics.k8s.io"
        found = self.api.get(API_SERVICES_PATH)["items"]
        return next((item for item in found if item["metadata"]["name"] == name), None)

    def registered(self) -> list[str | None]:
        """Return the uids of both APIServices; None for one that does not exist."""
        found = [self.api_service(version) for version in METRICS_VERSIONS]
        return [None if item is None else str(item["metadata"]["uid"]) for item in found]


def take_over(release: Release, version: str) -> None:
    """Take over the APIService, as `kubectl apply` of another adapter's manifest does."""
    name = f"{version}.custom.metrics.k8s.io"
    body: Json = {"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService", "metadata": {"name": name}}
    body["spec"] = {"service": {"name": "prometheus-adapter", "namespace": "monitoring"}}
    release.api.apply(f"{API_SERVICES_PATH}/{name}", body)


def render(*values: str) -> list[Json]:
    """Return all objects of the chart, in Helm's order. values: as for `--set`."""
    return _render(*(option for value in values for option in ("--set", value)))


def render_json(**values: Any) -> list[Json]:
    """Return the objects without the CRD. values: by the top-level name, of any type."""
    return _render(
        "--set=crds.create=false", *(f"--set-json={name}={json.dumps(value)}" for name, value in values.items())
    )


def _render(*options: str) -> list[Json]:
    return [document for document in yaml.load_all(_template(options), yaml.CSafeLoader) if document]


@cache
def _template(options: tuple[str, ...]) -> str:
    return helm("template", RELEASE, CHART, "--namespace", SYSTEM_NAMESPACE, *options)


def dry_run(api: Api, objects: list[Json]) -> None:
    """Apply all objects but Pods, which need ServiceAccounts, as dry runs.

    Raises ApiError if the API server refuses one.
    """
    # A binding is only taken where what it grants is there, and a custom resource where its definition is.
    for item in sorted((item for item in objects if item["kind"] != "Pod"), key=lambda item: "Binding" in item["kind"]):
        path = path_of(api, item) + "?fieldManager=test&fieldValidation=Strict"
        api.call("PATCH", path + "&dryRun=All", item, "application/apply-patch+yaml")


def find(objects: list[Json], kind: str, name: str) -> Json:
    return next(item for item in objects if (item["kind"], item["metadata"]["name"]) == (kind, name))


def pods_of(objects: list[Json]) -> dict[str, Json]:
    """Return the pod spec of each workload, by name."""
    workloads = [item for item in objects if "template" in item.get("spec", {})]
    return {item["metadata"]["name"]: item["spec"]["template"]["spec"] for item in workloads}


def path_of(api: Api, item: Json) -> str:
    """Return the object's path at the API server, which its discovery gives."""
    version, namespace = item["apiVersion"], item["metadata"].get("namespace")
    prefix = f"/api/{version}" if version == "v1" else f"/apis/{version}"
    resources = api.get(prefix)["resources"]
    found = next(r for r in resources if r["kind"] == item["kind"] and "/" not in r["name"])
    place = f"/namespaces/{namespace or SYSTEM_NAMESPACE}" if found["namespaced"] else ""
    return f"{prefix}{place}/{found['name']}/{item['metadata']['name']}"


def read_secret(api: Api, name: str) -> dict[str, bytes]:
    secret = api.get(f"/api/v1/namespaces/{SYSTEM_NAMESPACE}/secrets/{name}")
    return {key: base64.b64decode(value) for key, value in (secret.get("data") or {}).items()}


@contextmanager
def running(
    plane: ControlPlane,
    process: str,
    objects: list[Json],
    folder: Path,
    *more: str,
) -> Iterator[Callable[[], None]]:
    """Run a process of the chart with the chart's flags, as its ServiceAccount. Flags in `more` take precedence.

    What it yields fails the test, with the log, if the process has ended.
    """
    deployment = find(objects, "Deployment", f"conveyor-{process}")
    (container,), namespace = deployment["spec"]["template"]["spec"]["containers"], deployment["metadata"]["namespace"]
    file = folder / f"{process}-{namespace}.kubeconfig"
    kubeconfig = write_account_kubeconfig(plane, f"conveyor-{process}", file, namespace)
    command = [sys.executable, *container["command"][1:], *container["args"], f"--kubeconfig={kubeconfig}", *more]
    log = folder / f"{process}-{namespace}.log"
    with log.open("wb") as output:
        started = subprocess.Popen(command, stdout=output, stderr=output)

    def check() -> None:
        assert started.poll() is None, log.read_text()

    try:
        yield check
        check()
    finally:
        started.terminate()
        assert started.wait(timeout=60) == 0, log.read_text()


@dataclass(frozen=True, slots=True)
class Reachable:
    """A release in a cluster without working cluster IPs.

    The API server finds the metrics server at `port` of this machine.
    """

    chart: Path
    port: int


def make_reachable_chart(folder: Path) -> Reachable:
    """Make a copy of the chart whose metrics Service is an ExternalName, as in `e2e.cluster.control_plane`."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        port: int = holder.getsockname()[1]
    chart = shutil.copytree(CHART, folder / "chart")
    service = chart / "templates" / "metrics" / "service.yaml"
    text = service.read_text().replace("port: 443, targetPort: https", f"port: {port}")
    assert str(port) in text
    service.write_text(re.sub(r"  selector:.*\n", "  type: ExternalName\n  externalName: localhost\n", text))
    return Reachable(chart, port)


@contextmanager
def running_metrics(plane: ControlPlane, objects: list[Json], folder: Path, port: int) -> Iterator[None]:
    """Run the metrics server with the operator's certificate, and a kubelet that marks its pods as available."""
    api, certificates = Api(plane.kubeconfig), folder / "certificates"
    certificates.mkdir()
    wait_until("its certificate", lambda: read_secret(api, METRICS_TLS_SECRET))
    for file, content in read_secret(api, METRICS_TLS_SECRET).items():
        (certificates / file).write_bytes(content)
    flags = ("--host=127.0.0.1", f"--https-port={port}", "--admin-port=0", f"--certificate-folder={certificates}")
    with running(plane, "metrics", objects, folder, *flags), Kubelet(Space(api, SYSTEM_NAMESPACE), ready):
        yield


def running_operator(
    plane: ControlPlane, objects: list[Json], folder: Path, *more: str
) -> AbstractContextManager[Callable[[], None]]:
    return running(plane, "operator", objects, folder, "--host=127.0.0.1", "--admin-port=0", *more)


def write_account_kubeconfig(plane: ControlPlane, account: str, path: Path, namespace: str = SYSTEM_NAMESPACE) -> Path:
    """Write a kubeconfig with the credentials that a pod of the ServiceAccount has."""
    accounts = f"/api/v1/namespaces/{namespace}/serviceaccounts"
    answer = Api(plane.kubeconfig).create(f"{accounts}/{account}/token", {"spec": {}})
    config = yaml.safe_load(plane.kubeconfig.read_text())
    config["users"][0]["user"] = {"token": answer["status"]["token"]}
    path.write_text(yaml.safe_dump(config))
    return path
