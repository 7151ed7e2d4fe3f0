"""What objects of hostile tenants cost the operator and the gateway: restarts, memory, and the wait of a good service.

    .venv/bin/python bench/heavy_objects.py [--wide 20] [--deep 20]

A real etcd, API server and controller manager; a real operator and a real gateway. While they run it writes
InferenceServices and ConfigMaps, `--deep` with managed fields of 3,000 levels and `--wide` with 20,000 labels
(0.35 MB); then both processes start anew. Prints a table; ends with status 1 if a process ended, a good service waited
for ten seconds or more, or the operator took 256 MiB or the gateway 300 MiB. etcd's quota is 2 GB, its default.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `e2e` and `tests` are no installed packages

from tests.operator.stage import Space, install_crd, make_service, wait_until

from conveyor_api import names
from e2e.cluster.api import Api
from e2e.cluster.control_plane import ControlPlane

LIMITS_MIB = {"operator": 256, "gateway": 300}
GOOD_SERVICE_SECONDS = 10
WIDE_LABELS = "".join(
    f',"l{number:06d}":"{number}"' for number in range(20_000)
)  # for 60,000 the API server takes 30 s

# API version, path and spec of each kind
OBJECTS = {
    "InferenceService": (
        names.API_VERSION,
        f"/apis/{names.API_VERSION}/namespaces/default/inferenceservices",
        ',"spec":{"model":{"uri":"pvc://models/demo"},"replicas":0}',
    ),
    "ConfigMap": ("v1", "/api/v1/namespaces/default/configmaps", ""),
}
KINDS = list(OBJECTS)


class Tenant:
    """Writes hostile objects, as bytes: Python's own JSON reader gives up on the deep ones."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self.bytes_written = 0

    def write(self, deep: int, wide: int) -> None:
        """Objects of both kinds in turn."""
        for number in range(deep):
            self._create(f"deep-{number}", KINDS[number % 2], _nested_fields, "")
        for number in range(wide):
            self._create(f"wide-{number}", KINDS[number % 2], lambda _: "", WIDE_LABELS)
            if not (number + 1) % 100:
                print(f"{number + 1} wide objects, {self.bytes_written / 1e6:.0f} MB", file=sys.stderr)

    def _create(self, name: str, kind: str, fields: Callable[[str], str], labels: str) -> None:
        version, path, spec = OBJECTS[kind]
        label = f'"{names.INFERENCE_SERVICE_LABEL}":"nobody"'
        metadata = f'"name":"{name}","namespace":"default","labels":{{{label}{labels}}}{fields(version)}'
        body = f'{{"apiVersion":"{version}","kind":"{kind}","metadata":{{{metadata}}}{spec}}}'.encode()
        self._api.send("POST", path, body)
        self.bytes_written += len(body)


def _nested_fields(version: str) -> str:
    fields = '{"f:a":' * 3000 + "{}" + "}" * 3000
    entry = f'{{"manager":"m","operation":"Update","apiVersion":"{version}"'
    return f',"managedFields":[{entry},"fieldsType":"FieldsV1","fieldsV1":{fields}}}]'


@contextmanager
def processes(kubeconfig: Path) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    common = [f"--kubeconfig={kubeconfig}", "--host=127.0.0.1", "--admin-port=0", "--log-level=error"]
    commands = {
        "operator": ["conveyor_operator", *common, "--engine-image=example/engine:1", "--metrics-api=false"],
        "gateway": ["conveyor_gateway", *common, "--port=0", "--drain-delay-seconds=0"],
    }
    running = {name: subprocess.Popen([sys.executable, "-m", *command]) for name, command in commands.items()}
    try:
        yield running
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait(30)


def peak_mib(process: subprocess.Popen[bytes]) -> float:
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def time_good_service(space: Space, name: str) -> float:
    """Seconds from its creation until its Deployment is there."""
    began = time.monotonic()
    space.create("InferenceService", make_service(name))
    wait_until(f"{name} has its children", lambda: space.get("Deployment", names.engine_name(name)), 300)
    return time.monotonic() - began


def measure(space: Space, kubeconfig: Path, deep: int, wide: int) -> bool:
    """Prints a row for each process and good service; whether all bars were met."""
    good, tenant = True, Tenant(space.api)
    for life in ("written while they run", "written before they start"):
        with processes(kubeconfig) as running:
            time_good_service(space, f"first-{life.split()[1]}")
            if life.endswith("run"):
                tenant.write(deep, wide)
            seconds = time_good_service(space, f"good-{life.split()[1]}")
            good &= seconds < GOOD_SERVICE_SECONDS
            print(f"| {life} | a good service waits | {seconds:.1f} s | < {GOOD_SERVICE_SECONDS} s |")
            for name, process in running.items():
                ended, mib = process.poll() is not None, 0.0
                if not ended:
                    mib = peak_mib(process)
                good &= not ended and mib < LIMITS_MIB[name]
                print(f"| {life} | {name} | {'ended' if ended else f'{mib:.0f} MiB'} | < {LIMITS_MIB[name]} MiB |")
    print(f"\n{tenant.bytes_written / 1e6:.0f} MB in {deep} deep and {wide} wide objects")
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deep", type=int, default=20, help="objects of 3,000 levels")
    parser.add_argument("--wide", type=int, default=20, help="objects with 20,000 labels")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ControlPlane(folder=Path(folder)) as control_plane:
        api = Api(control_plane.kubeconfig)
        install_crd(api)
        print("| objects | what | seen | bar |\n| --- | --- | --- | --- |")
        good = measure(Space(api, "default"), control_plane.kubeconfig, options.deep, options.wide)
    print("all within their bars" if good else "NOT within their bars")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
