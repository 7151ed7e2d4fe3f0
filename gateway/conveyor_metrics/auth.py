"""Whom this server answers: the API server's front proxy, for the user that it names. Pure; called by `app`.

The API server authenticates and authorizes the caller (RBAC on custom.metrics.k8s.io) before it passes the question on,
with a client certificate of its own and the user in headers. It publishes the authority of that certificate, the names
that it may carry and the names of the headers in ConfigMap kube-system/extension-apiserver-authentication.
So no SubjectAccessReview here: it would ask the same API server the same question a second time.

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
    """The members of the ConfigMap that are read."""

    metadata: Identity
    data: NotRequired[dict[str, str] | None]


@dataclass(frozen=True, slots=True)
class Trust:
    """The front proxy as the API server describes it; an empty `allowed_names` allows every name."""

    authorities_pem: str
    allowed_names: tuple[str, ...]
    username_headers: tuple[str, ...]


def parse_trust(data: Mapping[str, str]) -> Trust:
    """Reads the ConfigMap's `data`; raises InvalidTrust if it does not name a usable authority."""
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
    """The user for whom the front proxy asks. Raises Unauthenticated.

    `peer_certificate` is what `SSLSocket.getpeercert()` returns: only a certificate that the TLS handshake has
    verified against `trust.authorities_pem`, or None or empty if the caller showed none.
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
