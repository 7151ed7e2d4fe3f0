"""Authenticates the API server's front proxy, which forwards users' queries. Pure; called by `app`.

The API server authenticates and authorizes the user (RBAC on custom.metrics.k8s.io). Then it forwards the query with
its own client certificate and the user in headers. ConfigMap kube-system/extension-apiserver-authentication contains
the authority of that certificate, its allowed names and the names of the headers.

So no SubjectAccessReview is needed: it would repeat the API server's authorization.

Source: k8s.io/apiserver pkg/authentication/request/headerrequest.
"""

import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

from conveyor_kube.wanted_json import Identity
from conveyor_metrics.errors import InvalidTrust, Unauthenticated

CONFIG_MAP_NAMESPACE = "kube-system"
CONFIG_MAP_NAME = "extension-apiserver-authentication"


class ConfigMapBody(TypedDict):
    """The fields of the ConfigMap that are read."""

    metadata: Identity
    data: NotRequired[dict[str, str] | None]


@dataclass(frozen=True, slots=True)
class Trust:
    """The API server's description of the front proxy. An empty `allowed_names` allows every name."""

    authorities_pem: str
    allowed_names: tuple[str, ...]
    username_headers: tuple[str, ...]


def parse_trust(data: Mapping[str, str]) -> Trust:
    """Parse the ConfigMap's `data`. Raises InvalidTrust if it has no usable authority."""
    authorities = data.get("requestheader-client-ca-file", "")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(cadata=authorities or "-")
    except ssl.SSLError as error:
        raise InvalidTrust(
            f"requestheader-client-ca-file of ConfigMap {CONFIG_MAP_NAMESPACE}/{CONFIG_MAP_NAME} is not a certificate"
            f" ({error}): the aggregation layer of this cluster is off; start its API servers with"
            " --requestheader-client-ca-file"
        ) from error
    headers = _parse_names(data, "requestheader-username-headers") or ("X-Remote-User",)
    return Trust(authorities, _parse_names(data, "requestheader-allowed-names"), headers)


def authenticate(trust: Trust, peer_certificate: Mapping[str, Any] | None, headers: Mapping[str, str]) -> str:
    """Return the user for whom the front proxy sends the query. Raises Unauthenticated.

    peer_certificate: the result of `SSLSocket.getpeercert()`. The TLS handshake has verified it against
    `trust.authorities_pem`. `peer_certificate` is None or empty if the caller presented none.
    """
    if not peer_certificate:
        raise Unauthenticated("no client certificate: only the API server's front proxy may call this server")
    names = _common_names(peer_certificate)
    if trust.allowed_names and not set(names) & set(trust.allowed_names):
        raise Unauthenticated(f"the client certificate's name {names} is not an allowed front proxy name")
    for header in trust.username_headers:
        if user := headers.get(header):
            return user
    raise Unauthenticated(f"the front proxy names no user in {', '.join(trust.username_headers)}")


def _common_names(certificate: Mapping[str, Any]) -> list[str]:
    subject = certificate.get("subject", ())
    return [value for part in subject for key, value in part if key == "commonName"]


def _parse_names(data: Mapping[str, str], key: str) -> tuple[str, ...]:
    try:
        names = json.loads(data.get(key) or "[]")
    except json.JSONDecodeError as error:
        raise InvalidTrust(f"{key} of ConfigMap {CONFIG_MAP_NAME} is not JSON: {error}") from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InvalidTrust(f"{key} of ConfigMap {CONFIG_MAP_NAME} is not a list of names")
    return tuple(names)
