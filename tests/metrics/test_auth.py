"""Tests who may read metrics, by the ConfigMap, the certificate and the headers."""

import json
from pathlib import Path
from typing import Any

import pytest

from conveyor_metrics.auth import Trust, authenticate, parse_trust
from conveyor_metrics.errors import InvalidTrust, Unauthenticated
from e2e.cluster.certificates import Authority


def build_data(folder: Path, **changes: str) -> dict[str, str]:
    keys = {
        "requestheader-client-ca-file": Authority(folder, "front-proxy").certificate.read_text(),
        "requestheader-allowed-names": json.dumps(["front-proxy-client"]),
        "requestheader-username-headers": json.dumps(["X-Remote-User"]),
    }
    return {**keys, **{f"requestheader-{key.replace('_', '-')}": value for key, value in changes.items()}}


def build_trust(*allowed: str) -> Trust:
    return Trust("", allowed, ("X-Remote-User", "X-Other-User"))


def build_certificate(name: str) -> dict[str, Any]:
    return {"subject": ((("organizationName", "front-proxy-client"),), (("commonName", name),))}


def test_the_config_map_says_authority_names_and_headers(tmp_path: Path) -> None:
    data = build_data(tmp_path, username_headers='["X-User", "X-Remote-User"]')
    trust = parse_trust(data)
    assert trust.authorities_pem == data["requestheader-client-ca-file"]
    assert trust.allowed_names == ("front-proxy-client",)
    assert trust.username_headers == ("X-User", "X-Remote-User")


def test_a_cluster_without_aggregation_layer_is_named_with_the_flag_to_set() -> None:
    with pytest.raises(InvalidTrust, match="start its API servers with --requestheader-client-ca-file"):
        parse_trust({"client-ca-file": "..."})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"client_ca_file": "-----BEGIN CERTIFICATE-----\nno"}, "is not a certificate"),
        ({"allowed_names": "front-proxy-client"}, "requestheader-allowed-names .* is not JSON"),
        ({"allowed_names": '{"a": 1}'}, "requestheader-allowed-names .* is not a list of names"),
        ({"username_headers": "[1]"}, "requestheader-username-headers .* is not a list of names"),
    ],
)
def test_a_broken_config_map_is_refused_with_the_key(tmp_path: Path, changes: dict[str, str], sentence: str) -> None:
    with pytest.raises(InvalidTrust, match=sentence):
        parse_trust(build_data(tmp_path, **changes))


def test_the_front_proxy_speaks_for_the_user_of_the_first_header_that_is_there() -> None:
    trust, certificate = build_trust("front-proxy-client"), build_certificate("front-proxy-client")
    assert authenticate(trust, certificate, {"X-Remote-User": "hpa", "X-Other-User": "other"}) == "hpa"
    assert authenticate(trust, certificate, {"X-Other-User": "other"}) == "other"


def test_no_allowed_names_allow_every_name() -> None:
    assert authenticate(build_trust(), build_certificate("anybody"), {"X-Remote-User": "hpa"}) == "hpa"


@pytest.mark.parametrize("certificate", [None, {}], ids=["none", "not verified"])
def test_a_caller_without_a_certificate_is_not_believed(certificate: dict[str, Any] | None) -> None:
    with pytest.raises(Unauthenticated, match="no client certificate"):
        authenticate(build_trust(), certificate, {"X-Remote-User": "admin"})


def test_another_name_under_the_same_authority_is_not_believed() -> None:
    with pytest.raises(Unauthenticated, match="is not an allowed front proxy name"):
        authenticate(build_trust("front-proxy-client"), build_certificate("kubelet"), {"X-Remote-User": "a"})


def test_a_front_proxy_that_names_no_user_is_not_believed() -> None:
    with pytest.raises(Unauthenticated, match="names no user in X-Remote-User, X-Other-User"):
        authenticate(build_trust(), build_certificate("a"), {"X-Remote-User": ""})
