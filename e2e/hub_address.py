"""Finds the address at which pods reach a server on this machine, for stories that run a model hub here."""

from e2e import kube
from e2e.cluster import programs


def host_address() -> str:
    """The node's own address on the local cluster, which is this machine; Docker's gateway on kind."""
    if kube.current_context() == "conveyor-local":
        node = kube.list_("nodes", "default")[0]
        return next(a["address"] for a in node["status"]["addresses"] if a["type"] == "InternalIP")
    inspect = ("network", "inspect", "kind", "-f", "{{range .IPAM.Config}}{{.Gateway}} {{end}}")
    gateways = programs.run("docker", *inspect, check=True, capture_output=True, text=True).stdout.split()
    return next(address for address in gateways if ":" not in address)
