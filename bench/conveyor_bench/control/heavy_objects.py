"""Measures the cost of hostile tenants' objects: restarts and memory of the programs, and the wait of a good service.

Runs a real etcd, API server, controller manager, operator and gateway. It writes `--deep` InferenceServices and
ConfigMaps with managed fields of 3,000 levels, and `--wide` ones with 20,000 labels (0.35 MB, and as much again in
managed fields). Then the operator and the gateway restart. The good services are in another namespace. Prints a table.
Exits with 1 if a process died, or if a good service waited for ten seconds or more. Also exits with 1 if the operator
used 256 MiB or more, or the gateway 300 MiB or more. The first good service after the restart has no bar.

etcd has its default quota of 2 GiB. Before the restart, `--fill` fills etcd up to a share of the quota. The API
server needs 0.5 s and more for a wide object, so the command copies the last two objects directly in etcd.
"""

import argparse
import base64
import http.client
import json
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.operator.stage import Json, Space, make_service, wait_until

from conveyor_api import names
from conveyor_bench.processes import running
from e2e.cluster.api import Api
from e2e.cluster.control_plane import ControlPlane
from e2e.cluster.definitions import install_definitions

QUOTA_BYTES = 2 << 30
LIMITS_MIB = {"operator": 256, "gateway": 300}
GOOD_SERVICE_SECONDS = 10
WIDE_LABELS = "".join(
    f',"l{number:06d}":"{number}"' for number in range(20_000)
)  # with 60,000 labels the API server takes 30 s

TENANT = "tenant"  # namespace of the hostile tenant; the good services are in default

# API version, path and spec of each kind
OBJECTS = {
    "InferenceService": (
        names.API_VERSION,
        f"/apis/{names.API_VERSION}/namespaces/{TENANT}/inferenceservices",
        ',"spec":{"model":{"uri":"pvc://models/demo"},"replicas":0}',
    ),
    "ConfigMap": ("v1", f"/api/v1/namespaces/{TENANT}/configmaps", ""),
}
KINDS = list(OBJECTS)
REGISTRY = {"InferenceService": f"{names.GROUP}/{names.PLURAL}", "ConfigMap": "configmaps"}  # their places in etcd


class Tenant:
    """Writes hostile objects as bytes, because Python's JSON parser cannot handle the deep ones."""

    def __init__(self, api: Api) -> None:
        self._api = api

    def write(self, deep: int, wide: int) -> None:
        """Create objects of both kinds in turn. deep, wide: how many."""
        for number in range(deep):
            self._create(f"deep-{number}", KINDS[number % 2], _nested_fields, "")
        for number in range(wide):
            self._create(_wide_name(number), KINDS[number % 2], lambda _: "", WIDE_LABELS)
            if not (number + 1) % 100:
                print(f"{number + 1} wide objects", file=sys.stderr)

    def _create(self, name: str, kind: str, fields: Callable[[str], str], labels: str) -> None:
        version, path, spec = OBJECTS[kind]
        label = f'"{names.INFERENCE_SERVICE_LABEL}":"nobody"'
        metadata = f'"name":"{name}","namespace":"{TENANT}","labels":{{{label}{labels}}}{fields(version)}'
        body = f'{{"apiVersion":"{version}","kind":"{kind}","metadata":{{{metadata}}}{spec}}}'.encode()
        self._api.send("POST", path, body)


class Etcd:
    """etcd's JSON gateway, over the socket in the control plane's folder."""

    def __init__(self, path: Path) -> None:
        self._connection = http.client.HTTPConnection("localhost")
        self._connection.sock = socket.socket(socket.AF_UNIX)
        self._connection.sock.connect(str(path))

    def bytes_used(self) -> int:
        return int(self._call("maintenance/status", {})["dbSize"])

    def read(self, key: str) -> bytes:
        return base64.b64decode(self._call("kv/range", {"key": _encode(key.encode())})["kvs"][0]["value"])

    def write(self, key: str, value: bytes) -> None:
        self._call("kv/put", {"key": _encode(key.encode()), "value": _encode(value)})

    def _call(self, name: str, body: Json) -> Json:
        self._connection.request("POST", f"/v3/{name}", json.dumps(body))
        with self._connection.getresponse() as response:
            answer: Json = json.load(response)
        if response.status != 200:
            raise RuntimeError(f"etcd: {name}: {answer}")
        return answer


def _encode(value: bytes) -> str:
    return base64.b64encode(value).decode()


class Copies:
    """Copies of the last two wide objects, one of each kind. A copy has another name and uid of the same length."""

    def __init__(self, api: Api, etcd: Etcd, wide: int) -> None:
        self._etcd = etcd
        self._originals = [self._original(Space(api, TENANT), number) for number in range(wide - 2, wide)]
        self.number = wide

    def _original(self, space: Space, number: int) -> tuple[str, bytes, bytes]:
        kind, name = KINDS[number % 2], _wide_name(number)
        key = f"/registry/{REGISTRY[kind]}/{TENANT}/{name}"
        uid = space.need(kind, name)["metadata"]["uid"]
        return key, self._etcd.read(key), uid.encode()

    def fill(self, fraction: float) -> int:
        """Copy objects until etcd has used `fraction` of its quota. Return the number of wide objects."""
        while self._etcd.bytes_used() < fraction * QUOTA_BYTES:
            for key, value, uid in self._originals:
                old, new = key.rpartition("/")[2], _wide_name(self.number)
                copy = value.replace(old.encode(), new.encode()).replace(uid, str(uuid.uuid4()).encode())
                self._etcd.write(key.replace(old, new), copy)
                self.number += 1
            if not self.number % 100:
                print(f"{self.number} wide objects, {self._etcd.bytes_used() / 1e6:.0f} MB", file=sys.stderr)
        return self.number


def _wide_name(number: int) -> str:
    return f"wide-{number:05d}"


def _nested_fields(version: str) -> str:
    fields = '{"f:a":' * 3000 + "{}" + "}" * 3000
    entry = f'{{"manager":"m","operation":"Update","apiVersion":"{version}"'
    return f',"managedFields":[{entry},"fieldsType":"FieldsV1","fieldsV1":{fields}}}]'


@contextmanager
def processes(kubeconfig: Path) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    quiet = "--log-level=error"
    of_operator = (quiet, "--engine-image=example/engine:1", "--metrics-api=false")
    with (
        running("conveyor_operator", kubeconfig, *of_operator) as operator,
        running("conveyor_gateway", kubeconfig, quiet, "--port=0", "--drain-delay-seconds=0") as gateway,
    ):
        yield {"operator": operator, "gateway": gateway}


def peak_mib(process: subprocess.Popen[bytes]) -> float:
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def time_good_service(space: Space, name: str) -> float:
    """Create a service. Return the seconds until its Deployment exists."""
    began = time.monotonic()
    space.create("InferenceService", make_service(name))
    wait_until(f"{name} has its children", lambda: space.get("Deployment", names.engine_name(name)), 1200)
    return time.monotonic() - began


def measure(space: Space, control_plane: ControlPlane, options: argparse.Namespace) -> bool:
    """Print a row for each process and good service, before and after the restart. Return whether all bars are met."""
    etcd, tenant = Etcd(control_plane.folder / "etcd.sock"), Tenant(space.api)
    with processes(control_plane.kubeconfig) as started:
        time_good_service(space, "first")
        tenant.write(options.deep, options.wide)
        good = report("written while they run", space, "second", started)
    wide = Copies(space.api, etcd, options.wide).fill(options.fill)
    with processes(control_plane.kubeconfig) as started:
        print(f"| written before they start | both have read them | {time_good_service(space, 'third'):.1f} s | |")
        good &= report("written before they start", space, "fourth", started)
    used = etcd.bytes_used() / QUOTA_BYTES
    print(f"\n{options.deep} deep and {wide} wide objects: {used:.0%} of etcd's quota of 2 GiB")
    return good


def report(life: str, space: Space, name: str, started: dict[str, subprocess.Popen[bytes]]) -> bool:
    """Print the current figures of a good service and the processes. Return whether they are within their bars."""
    seconds = time_good_service(space, name)
    good = seconds < GOOD_SERVICE_SECONDS
    print(f"| {life} | a good service waits | {seconds:.1f} s | < {GOOD_SERVICE_SECONDS} s |")
    for program, process in started.items():
        ended, mib = process.poll() is not None, 0.0
        if not ended:
            mib = peak_mib(process)
        good &= not ended and mib < LIMITS_MIB[program]
        print(f"| {life} | {program} | {'ended' if ended else f'{mib:.0f} MiB'} | < {LIMITS_MIB[program]} MiB |")
    return good


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m conveyor_bench heavy-objects", description=__doc__)
    parser.add_argument("--deep", type=int, default=20, help="objects of 3,000 levels")
    parser.add_argument("--wide", type=int, default=20, help="objects with 20,000 labels")
    parser.add_argument(
        "--fill", type=float, default=0, help="then copies of the wide ones, up to this part of etcd's quota"
    )
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder, ControlPlane(folder=Path(folder)) as control_plane:
        api = Api(control_plane.kubeconfig)
        install_definitions(api)
        api.create("/api/v1/namespaces", {"metadata": {"name": TENANT}})
        print("| objects | what | seen | bar |\n| --- | --- | --- | --- |")
        good = measure(Space(api, "default"), control_plane, options)
    print("all within their bars" if good else "NOT within their bars")
    return 0 if good else 1
