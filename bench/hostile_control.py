"""What another namespace gets of the operator and the metrics server while clients and a tenant are hostile.

    .venv/bin/python bench/hostile_control.py          # `make soak` runs it too; names choose: hostile_control.py idle

Real processes on a real API server (the control plane of the tests). Each attack is measured twice: while it is aimed
at something else (another metrics server, ConfigMaps, unlabelled pods), and at the programs. What is judged is the
difference, without the shared processors and the API server's own work.
Prints each bar, met or missed, and ends with status 1 if one is missed; the last line is one JSON object.
"""

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `e2e` and `tests` are no installed packages

from control_attacks import ATTACKS, TENANT, Stage
from control_others import NEVER, Asked, Others, Taken
from tests.gateway.cluster import own_address
from tests.gateway.process import GatewayProcess
from tests.metrics.aggregation import (
    SLICES,
    VALUES,
    build_slice,
    free_port,
    register,
    running_server,
    write_serving_certificate,
)
from tests.operator.stage import Space, make_service

from e2e.cluster.api import Api, wait_until
from e2e.cluster.certificates import Authority
from e2e.cluster.control_plane import ControlPlane
from e2e.cluster.definitions import install_definitions

ROOT = Path(__file__).resolve().parents[1]
OTHERS = "others"
METRIC = "inference_queue_depth"
BACK_SECONDS = 5  # after an attack, until which nothing is measured
_RSS = re.compile(r"VmRSS:\s+(\d+) kB")


@dataclass(frozen=True, slots=True)
class Control:
    """The programs that are measured, and where clients reach them and the others."""

    plane: ControlPlane
    tenant: Path
    pids: dict[str, int]
    ports: list[int]
    https: int
    elsewhere: list[int]
    elsewhere_https: int
    probes: list[str]


# The stage


@contextlib.contextmanager
def running_operator(plane: ControlPlane) -> Iterator[tuple[int, int]]:
    """Its process id and its admin port, which answers."""
    port = free_port()
    command = [sys.executable, "-m", "conveyor_operator", "--host=127.0.0.1", f"--admin-port={port}"]
    command += [f"--kubeconfig={plane.kubeconfig}", "--metrics-api=false", "--log-level=warning"]
    with tempfile.TemporaryFile() as log, subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log) as process:
        try:
            yield process.pid, port
        finally:
            process.terminate()


@contextlib.contextmanager
def running_control() -> Iterator[Control]:
    address = own_address()
    with contextlib.ExitStack() as stack:
        plane = stack.enter_context(ControlPlane())
        api = Api(plane.kubeconfig)
        install_definitions(api)
        for namespace in (TENANT, OTHERS):
            api.create("/api/v1/namespaces", {"metadata": {"name": namespace}})
            Space(api, namespace).create("InferenceService", make_service("good", autoscaling={"maxReplicas": 4}))
        tenant = admit_tenant(plane, api)
        operator, operator_port = stack.enter_context(running_operator(plane))
        gateway = stack.enter_context(GatewayProcess(plane.kubeconfig, "--host="))  # no slice may name a loopback
        api.apply(f"{SLICES}/gateway", build_slice("gateway", [(address, gateway.admin_port)]))
        folders = [Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in range(2)]
        authorities = [Authority(folder, "authority") for folder in folders]
        for authority, folder in zip(authorities, folders, strict=True):
            write_serving_certificate(authority, folder)
        metrics, https, admin = stack.enter_context(running_server(plane, folders[0]))
        _, elsewhere_https, elsewhere_admin = stack.enter_context(running_server(plane, folders[1]))
        register(api, https, authorities[0])
        value = VALUES.format(version="v1beta2", namespace=OTHERS, name="good", metric=METRIC)
        wait_until("the HPA's value", partial(api.reachable, value), 60, lambda: None)
        yield Control(
            plane,
            tenant,
            {"operator": operator, "metrics server": metrics.pid, "gateway": gateway.process.pid},
            [operator_port, admin, https],
            https,
            [elsewhere_admin, elsewhere_admin, elsewhere_https],
            elsewhere_https,
            [f"http://127.0.0.1:{port}/{path}" for port in (operator_port, admin) for path in ("livez", "readyz")],
        )


def admit_tenant(plane: ControlPlane, api: Api) -> Path:
    """The kubeconfig of a user who may do everything in the tenant's namespace."""
    binding = {
        "metadata": {"name": "tenant"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
        "subjects": [{"kind": "User", "name": "tenant", "apiGroup": "rbac.authorization.k8s.io"}],
    }
    api.create(f"/apis/rbac.authorization.k8s.io/v1/namespaces/{TENANT}/rolebindings", binding)
    return plane.issue_kubeconfig("tenant", "tenant")


# The bars


@dataclass(frozen=True, slots=True)
class Bar:
    """`elsewhere` is the figure while the attack is aimed at something else; of memory, the one before the attack."""

    attack: str
    name: str
    elsewhere: float
    here: float
    limit: float

    @property
    def met(self) -> bool:
        return self.here - self.elsewhere < self.limit

    def __str__(self) -> str:
        figures = f"elsewhere {self.elsewhere:9.3f}  here {self.here:9.3f}  bar + {self.limit:5g}"
        return f"{self.attack:10}  {self.name:34}  {figures}  {'met' if self.met else 'MISSED'}"


def p99(values: list[float]) -> float:
    """Nearest rank: an answer that never came stays one."""
    return sorted(values)[int(len(values) * 0.99)]


@dataclass(frozen=True, slots=True)
class Measured:
    """One aim of an attack: what others got meanwhile and afterwards, and MiB of each program before and at most."""

    meanwhile: Taken
    afterwards: Taken
    before_mib: dict[str, float]
    peak_mib: dict[str, float]


def judge(attack: str, elsewhere: Measured, here: Measured) -> list[Bar]:
    def bar(name: str, other: float, this: float, limit: float) -> Bar:
        return Bar(attack, name, other, this, limit)

    beside, alone = here.meanwhile, elsewhere.meanwhile
    bars = [
        bar("another's median reconcile, s", median(alone.reconciles), median(beside.reconciles), 5),
        bar("another's slowest reconcile, s", max(alone.reconciles), max(beside.reconciles), 10),
        bar("the HPA's p50, ms", median(alone.values) * 1000, median(beside.values) * 1000, 100),
        bar("the HPA's p99, ms", p99(alone.values) * 1000, p99(beside.values) * 1000, 500),
        bar("the HPA's values that failed", 0, beside.values.count(NEVER), 1),
        bar("slowest probe, s", 0, max(beside.probes), 1),
        bar(f"slowest reconcile {BACK_SECONDS} s later, s", 0, max(here.afterwards.reconciles), 2),
    ]
    limits = {"operator": 150, "metrics server": 50, "gateway": 150}
    bars += [bar(f"{name}'s memory, MiB", here.before_mib[name], here.peak_mib[name], limits[name]) for name in limits]
    return bars


def read_mib(control: Control) -> dict[str, float]:
    found = {name: _RSS.search(Path(f"/proc/{pid}/status").read_text()) for name, pid in control.pids.items()}
    return {name: int(match[1]) / 1024 if match else NEVER for name, match in found.items()}


def attack(control: Control, others: Others, name: str, aimed: bool, seconds: float, num_services: int) -> Measured:
    value = VALUES.format(version="v1beta2", namespace=TENANT, name="good", metric=METRIC)
    stage = Stage(
        control.tenant,
        aimed,
        control.ports if aimed else control.elsewhere,
        control.https if aimed else control.elsewhere_https,
        f"http://127.0.0.1:{(control.ports if aimed else control.elsewhere)[0]}/metrics",
        value if aimed else f"/api/v1/namespaces/{TENANT}/configmaps?limit=1",
        num_services,
    )
    others.read()  # what came before
    before = peak = read_mib(control)
    began = time.monotonic()
    ATTACKS[name](stage)
    while time.monotonic() < began + seconds or (name == "services" and stage.num_done < num_services):
        time.sleep(0.1)
        peak = {program: max(mib, peak[program]) for program, mib in read_mib(control).items()}
    meanwhile = others.read()
    stage.ended.set()
    aim = "here" if aimed else "elsewhere"
    print(f"{name:10}  {aim}: {stage.num_done} in {time.monotonic() - began:.0f} s", file=sys.stderr)
    time.sleep(BACK_SECONDS)
    others.read()
    time.sleep(3)
    return Measured(meanwhile, others.read(), before, peak)


def run(names: list[str], seconds: float, num_services: int) -> bool:
    bars: list[Bar] = []
    with running_control() as control:
        value = VALUES.format(version="v1beta2", namespace=OTHERS, name="good", metric=METRIC)
        with Others(Asked(str(control.plane.kubeconfig), OTHERS, control.probes, value)) as others:
            for name in names:
                elsewhere = attack(control, others, name, False, seconds, num_services)
                for bar in judge(name, elsewhere, attack(control, others, name, True, seconds, num_services)):
                    print(bar, flush=True)
                    bars.append(bar)
    rows = [asdict(bar) | {"met": bar.met} for bar in bars]
    print(json.dumps({"benchmark": "hostile_control", "load_average": os.getloadavg(), "bars": rows}))
    return all(bar.met for bar in bars)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("attacks", nargs="*", metavar="attack", help=f"of {', '.join(ATTACKS)}; default: all")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each attack")
    parser.add_argument("--services", type=int, default=5000, help="that the attack `services` creates")
    arguments = parser.parse_args()
    if unknown := set(arguments.attacks) - set(ATTACKS):
        parser.error(f"no such attack: {', '.join(sorted(unknown))}")
    return 0 if run(arguments.attacks or list(ATTACKS), arguments.seconds, arguments.services) else 1


if __name__ == "__main__":
    sys.exit(main())
