"""Creates and removes the network of the local cluster: one node address on its own bridge, and routed pods.

Called by `local`, and by `second` for a node in its own network namespace, with a cable to the bridge. Pods are
connected by veth pairs (CNI plugin `ptp`). So every packet passes the node's routing, and kube-proxy's rules apply
without a bridge filter. Knows no process.
"""

import json
import re
from pathlib import Path

from e2e.cluster import programs

BRIDGE = "conveyor0"
NODE_ADDRESS = "10.187.0.1"
POD_CIDR = "10.188.0.0/16"
FIRST_POD_CIDR = "10.188.0.0/17"
SECOND_ADDRESS = "10.187.0.2"
SECOND_POD_CIDR = "10.188.128.0/17"
SERVICE_CIDR = "10.189.0.0/16"
SERVICE_ADDRESS = "10.189.0.1"  # of `kubernetes.default`
CNI_NAME = "conveyor"
CNI_PLUGINS = "/usr/lib/cni"

_CABLE = "conveyor1"  # the end of the second node's cable at the bridge; the other end is in the node
_NFT_TABLE = "conveyor"
_NFT_TABLES = (("ip", _NFT_TABLE), ("ip", "kube-proxy"), ("ip6", "kube-proxy"))
# Lets packets pass a firewall that drops unknown ones, as Docker's does.
_FORWARDED = (("-s", POD_CIDR), ("-d", POD_CIDR))
_CNI_RESULTS = Path("/var/lib/cni/results")
# Pods reach the outside with the host's address. Inside the cluster, addresses are not translated.
_MASQUERADE = f"""
table ip {_NFT_TABLE} {{
  chain leave {{
    type nat hook postrouting priority 100;
    ip saddr {POD_CIDR} ip daddr != {{ 10.187.0.0/24, {POD_CIDR}, {SERVICE_CIDR} }} masquerade
  }}
}}
"""


def create() -> None:
    _run("ip", "link", "add", BRIDGE, "type", "bridge")
    _run("ip", "address", "add", f"{NODE_ADDRESS}/24", "dev", BRIDGE)
    _run("ip", "link", "set", BRIDGE, "up")
    # Without a route, a connection to a service address fails before kube-proxy's rules see it.
    _run("ip", "route", "add", SERVICE_CIDR, "dev", BRIDGE)
    programs.run("nft", "-f", "-", input=_MASQUERADE, text=True, check=True)
    if _firewall() != ["-P FORWARD ACCEPT"]:
        for end in _FORWARDED:
            _run("iptables", "--wait", "-I", "FORWARD", *end, "-j", "ACCEPT")
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")


def create_second(namespace: Path) -> None:
    """Make the network of the second node. `namespace` is a file to which its namespace is bound."""
    namespace.touch()
    _run("unshare", f"--net={namespace}", "true")
    _run("ip", "link", "add", _CABLE, "type", "veth", "peer", "name", "eth0", "netns", namespace)
    inside = ("nsenter", f"--net={namespace}", "ip")
    _run(*inside, "address", "add", f"{SECOND_ADDRESS}/24", "dev", "eth0")
    for interface in ("lo", "eth0"):
        _run(*inside, "link", "set", interface, "up")
    _run(*inside, "route", "add", "default", "via", NODE_ADDRESS)
    _run("ip", "link", "set", _CABLE, "master", BRIDGE, "up")
    _run("ip", "route", "replace", SECOND_POD_CIDR, "via", SECOND_ADDRESS)


def connect_second(connected: bool) -> None:
    """Plug the cable of the second node in, or out."""
    _run("ip", "link", "set", _CABLE, "up" if connected else "down")


def delete_second() -> None:
    """Remove the cable, so that no packet leaves the second node any more. The namespace ends with its processes."""
    _run("ip", "link", "delete", _CABLE, check=False)


def delete() -> None:
    """Remove everything that `create`, kube-proxy and the CNI plugins made. Missing parts are no error."""
    delete_second()
    _run("ip", "link", "delete", BRIDGE, check=False)
    for interface in re.findall(r" dev (veth\S+)", "\n".join(_routes())):  # of pods whose network outlived the runtime
        _run("ip", "link", "delete", interface, check=False)
    for family, table in _NFT_TABLES:
        _run("nft", "delete", "table", family, table, check=False)
    for end in _FORWARDED:
        _run("iptables", "--wait", "-D", "FORWARD", *end, "-j", "ACCEPT", check=False)
    for result in _CNI_RESULTS.glob(f"{CNI_NAME}-*"):
        pod = json.loads(result.read_text())["containerId"]
        for file in _CNI_RESULTS.glob(f"*-{pod}-*"):  # the pod's loopback has a result too
            file.unlink()


def exists() -> bool:
    return Path(f"/sys/class/net/{BRIDGE}").exists()


def left() -> list[str]:
    """Return the names of the parts that `delete` would remove, and routes to pods."""
    tables = _output("nft", "list", "tables").splitlines()
    return [
        *(f"network interface {name}" for name in (BRIDGE, _CABLE) if Path(f"/sys/class/net/{name}").exists()),
        *(f"nft {table}" for table in (f"table {family} {name}" for family, name in _NFT_TABLES) if table in tables),
        *(f"iptables rule {rule}" for rule in _firewall() if POD_CIDR in rule),
        *(f"route {route.strip()}" for route in _routes()),
        *(f"file {result}" for result in _CNI_RESULTS.glob(f"{CNI_NAME}-*")),
    ]


def cni_configuration(data_folder: Path, pod_cidr: str) -> dict[str, object]:
    addresses = {
        "type": "host-local",
        "dataDir": str(data_folder),
        "ranges": [[{"subnet": pod_cidr}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    return {"cniVersion": "0.4.0", "name": CNI_NAME, "plugins": [{"type": "ptp", "ipam": addresses}]}


def _routes() -> list[str]:
    """Return the routes to pods. Each leads to an interface of its own."""
    return _output("ip", "route", "show", "root", POD_CIDR).splitlines()


def _firewall() -> list[str]:
    """Return iptables' rules for forwarded packets. Listing them creates no table."""
    return _output("iptables", "--wait", "-S", "FORWARD").splitlines()


def _output(*command: str) -> str:
    return str(programs.run(*command, check=True, capture_output=True, text=True).stdout)


def _run(*command: str | Path, check: bool = True) -> None:
    programs.run(*command, check=check, capture_output=True)
