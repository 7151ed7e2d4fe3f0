"""How a process on this machine reaches the gateway of our cluster, as the world outside would.

On the local cluster the Service's address answers from the host; on kind a port of this machine leads to its nodes.
"""

from pathlib import Path

from e2e import kube
from e2e.cluster import kind


def gateway_url() -> str:
    """`http://host:port` of the Service conveyor-gateway."""
    service = kube.get("service", "conveyor-gateway", kube.SYSTEM_NAMESPACE)
    if service is None:
        raise SystemExit('the chart is not installed: run "make deploy"')
    if kube.current_context() == kind.CONTEXT:
        return f"http://127.0.0.1:{kind.GATEWAY_PORT}"
    return f"http://{service['spec']['clusterIP']}"


def service_url(name: str, namespace: str) -> str:
    """The OpenAI base URL of an InferenceService."""
    return f"{gateway_url()}/{namespace}/{name}/v1"


def demo_url() -> str:
    """The demo's base URL; ends the program in one sentence if there is no demo."""
    try:
        if Path(kube.kubeconfig_path()).exists() and kube.get("infsvc", "demo", "default"):
            return service_url("demo", "default")
    except kube.CommandFailed:  # its cluster does not answer, or knows no such resource
        pass
    raise SystemExit("there is no demo: `make demo` brings it up")


if __name__ == "__main__":
    with kube.errors_in_words():
        print(demo_url())
