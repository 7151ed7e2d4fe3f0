"""Reads the variables of proxies. NO_PROXY has names, addresses and networks, as for Go programs and Kubernetes.

Python's library and botocore know no networks, so `NO_PROXY=10.0.0.0/8` has no effect on them. Used for addresses that
may be outside the cluster: buckets of models (`conveyor_engine.fetching`), images of requests
(`conveyor_engine.serving.media`), input files of jobs, and the API server that a kubeconfig names.
"""

import ipaddress
import os
import urllib.request
from urllib.parse import urlsplit


def find_proxy(url: str) -> str | None:
    """Return the proxy that HTTPS_PROXY, HTTP_PROXY and NO_PROXY set for this URL; None without a proxy."""
    return None if bypasses_proxy(url) else urllib.request.getproxies().get(urlsplit(url).scheme)


def bypasses_proxy(url: str) -> bool:
    """Return whether NO_PROXY exempts the host of this URL from proxies. A URL without a host is exempt."""
    parts = urlsplit(url)
    if not parts.hostname or urllib.request.proxy_bypass(parts.netloc.rpartition("@")[2]):
        return True
    try:
        address = ipaddress.ip_address(parts.hostname)
    except ValueError:
        return False
    exempt = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    return any(_contains(entry.strip(), address) for entry in exempt.split(","))


def _contains(network: str, address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    try:
        return address in ipaddress.ip_network(network, strict=False)
    except ValueError:
        return False
