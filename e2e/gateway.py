"""How a process on this machine reaches the gateway of our cluster, as the world outside would.

On the local cluster the Service's address answers from the host; on kind a port-forward stands in.
"""

import atexit
import subprocess
import sys
import time
import urllib.error
import urllib.request

from e2e import kube
from e2e.cluster.tools import binary

_FORWARDED = "http://127.0.0.1:18080"
_FORWARD = ("port-forward", "-n", kube.SYSTEM_NAMESPACE, "svc/conveyor-gateway", "18080:80")
_forward: list[tuple[str, "subprocess.Popen[bytes]"]] = []


def gateway_url() -> str:
    """`http://host:port` of the Service conveyor-gateway."""
    if not forward_command():
        service = kube.get("service", "conveyor-gateway", kube.SYSTEM_NAMESPACE)
        if service is None:
            raise SystemExit('the chart is not installed: run "make deploy"')
        return f"http://{service['spec']['clusterIP']}"
    if not _forward or _forward[0][1].poll() is not None:
        _forward[:] = [_port_forward()]
    return _forward[0][0]


def forward_command() -> str | None:
    """What has to run on this machine while the gateway is asked; None where its address answers without."""
    return None if kube.current_context() == "conveyor-local" else f"{binary('kubectl')} {' '.join(_FORWARD)}"


def _port_forward() -> tuple[str, "subprocess.Popen[bytes]"]:
    process = subprocess.Popen([str(binary("kubectl")), *_FORWARD], stdout=subprocess.DEVNULL)
    atexit.register(process.terminate)
    for _ in range(50):
        try:
            urllib.request.urlopen(f"{_FORWARDED}/healthz", timeout=1).close()
            return _FORWARDED, process
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise TimeoutError("kubectl port-forward to the gateway did not answer in 10 s")


def service_url(name: str, namespace: str) -> str:
    """The OpenAI base URL of an InferenceService."""
    return f"{gateway_url()}/{namespace}/{name}/v1"


if __name__ == "__main__":
    with kube.errors_in_words():
        if forward := forward_command():
            print(f"{_FORWARDED}/default/demo/v1")
            print(f"it answers while this runs: {forward}", file=sys.stderr)
        else:
            print(service_url("demo", "default"))
