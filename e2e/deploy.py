"""Install or upgrade the chart on the cluster of KUBECONFIG, with the images that `e2e.cluster load` brought.

`python -m e2e.deploy`; called by `make deploy`, `make demo` and `make e2e`.
"""

import time

from conveyor_api import names
from e2e import kube
from e2e.cluster import kind
from e2e.cluster.images import loaded_tag
from e2e.cluster.paths import REPOSITORY
from e2e.services import provide_namespace

CHART = REPOSITORY / "charts" / "conveyor"


def deploy() -> None:
    """Run Helm and wait until the three Deployments and both APIServices answer."""
    started = time.monotonic()
    install()
    wait_registered()
    print(f"Conveyor is up ({time.monotonic() - started:.0f} s).", flush=True)


def install(*values: str) -> None:
    """Run Helm, with more `name=value`, and wait until the three Deployments answer."""
    kube.require_our_cluster()
    context = kube.current_context()
    docker = context == kind.CONTEXT
    print(f"Installing the chart on {context} ...", flush=True)
    provide_namespace(kube.SYSTEM_NAMESPACE)
    tags = (f"image.tag={loaded_tag('control', docker)}", f"engine.image.tag={loaded_tag('engine', docker)}")
    kube.helm(
        "upgrade", "--install", "conveyor", str(CHART), "--namespace", kube.SYSTEM_NAMESPACE,
        "--set", ",".join([*tags, *(kind.CHART_VALUES if docker else ()), *values]),
        "--wait", "--timeout", "180s",
    )  # fmt: skip


def wait_registered() -> None:
    """Wait until the operator has registered the metrics API and the API server can use it."""
    for version in names.METRICS_VERSIONS:  # one by one: `kubectl wait` waits for the creation of one object only
        for condition in ("create", "condition=Available"):
            kube.kubectl("wait", f"apiservice/{version}.{names.METRICS_GROUP}", f"--for={condition}", "--timeout=90s")


if __name__ == "__main__":
    with kube.errors_in_words():
        deploy()
