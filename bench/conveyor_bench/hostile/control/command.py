"""Measures how hostile clients and a hostile tenant affect another namespace's use of operator and metrics server.

It runs real processes on a real API server (the control plane of the tests). Each attack is measured twice: first while
it is aimed at something else (another metrics server, ConfigMaps, unlabelled pods), and then while it is aimed at the
programs. The bars for reconciles and for the HPA's values limit the difference, so that the shared processors and the
API server's own work do not count.

Prints each bar, met or missed, and exits with 1 if one is missed. The last line is one JSON object. `make soak` runs
all attacks.
"""

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tests.gateway.cluster import own_address
from tests.gateway.process import GatewayProcess
from tests.operator.stage import Space, make_service

from conveyor_bench.hostile.bars import NEVER, Bar, print_result
from conveyor_bench.hostile.control.attacks import ATTACKS, TENANT, Stage
from conveyor_bench.hostile.control.others import Taken, Targets
from conveyor_bench.hostile.others import Others
from conveyor_bench.hostile.stage import running_metrics, running_operator, serve_metrics, value_path
from conveyor_bench.processes import resident_mib
from conveyor_load.percentiles import percentile
from e2e.cluster.api import Api
from e2e.cluster.control_plane import ControlPlane
from e2e.cluster.definitions import install_definitions

OTHERS = "others"
BACK_SECONDS = 5  # after an attack; measurements in this time are dropped


@dataclass(frozen=True, slots=True)
class Control:
    """The measured programs, and the addresses at which clients reach these and the unmeasured programs."""

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
        gateway = stack.enter_context(GatewayProcess(plane.kubeconfig, "--host="))  # EndpointSlices reject a loopback
        metrics, elsewhere = (stack.enter_context(running_metrics(plane)) for _ in range(2))
        serve_metrics(api, metrics, (address, gateway.admin_port), OTHERS)
        yield Control(
            plane,
            tenant,
            {"operator": operator, "metrics server": metrics.pid, "gateway": gateway.process.pid},
            [operator_port, metrics.admin_port, metrics.https_port],
            metrics.https_port,
            [elsewhere.admin_port, elsewhere.admin_port, elsewhere.https_port],
            elsewhere.https_port,
            [
                f"http://127.0.0.1:{port}/{path}"
                for port in (operator_port, metrics.admin_port)
                for path in ("livez", "readyz")
            ],
        )


def admit_tenant(plane: ControlPlane, api: Api) -> Path:
    """Return the kubeconfig of a user who may do everything in the tenant's namespace."""
    binding = {
        "metadata": {"name": "tenant"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
        "subjects": [{"kind": "User", "name": "tenant", "apiGroup": "rbac.authorization.k8s.io"}],
    }
    api.create(f"/apis/rbac.authorization.k8s.io/v1/namespaces/{TENANT}/rolebindings", binding)
    return plane.issue_kubeconfig("tenant", "tenant")


# The bars


@dataclass(frozen=True, slots=True)
class Measured:
    """The results of an attack with one aim.

    They are what others measured during and after the attack, and each program's memory before the attack and its peak.
    """

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
        bar("the HPA's p99, ms", percentile(alone.values, 99) * 1000, percentile(beside.values, 99) * 1000, 500),
        bar("the HPA's values that failed", 0, beside.values.count(NEVER), 1),
        bar("slowest probe, s", 0, max(beside.probes), 1),
        bar(f"slowest reconcile {BACK_SECONDS} s later, s", 0, max(here.afterwards.reconciles), 2),
    ]
    limits = {"operator": 150, "metrics server": 50, "gateway": 150}
    bars += [bar(f"{name}'s memory, MiB", here.before_mib[name], here.peak_mib[name], limits[name]) for name in limits]
    return bars


def read_mib(control: Control) -> dict[str, float]:
    return {name: resident_mib(pid) or NEVER for name, pid in control.pids.items()}


def attack(
    control: Control, others: Others[Taken], name: str, aimed: bool, seconds: float, num_services: int
) -> Measured:
    stage = Stage(
        control.tenant,
        aimed,
        control.ports if aimed else control.elsewhere,
        control.https if aimed else control.elsewhere_https,
        f"http://127.0.0.1:{(control.ports if aimed else control.elsewhere)[0]}/metrics",
        value_path(TENANT) if aimed else f"/api/v1/namespaces/{TENANT}/configmaps?limit=1",
        num_services,
    )
    others.read()  # drops what came before
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
        targets = Targets(str(control.plane.kubeconfig), OTHERS, control.probes, value_path(OTHERS))
        with Others("control.others", targets, Taken) as others:
            for name in names:
                elsewhere = attack(control, others, name, False, seconds, num_services)
                for bar in judge(name, elsewhere, attack(control, others, name, True, seconds, num_services)):
                    print(bar, flush=True)
                    bars.append(bar)
    return print_result("hostile-control", bars)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m conveyor_bench hostile-control", description=__doc__)
    parser.add_argument("attacks", nargs="*", metavar="attack", help=f"of {', '.join(ATTACKS)}; default: all")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each attack")
    parser.add_argument("--services", type=int, default=5000, help="that the attack `services` creates")
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.attacks) - set(ATTACKS):
        parser.error(f"no such attack: {', '.join(sorted(unknown))}")
    return 0 if run(arguments.attacks or list(ATTACKS), arguments.seconds, arguments.services) else 1
