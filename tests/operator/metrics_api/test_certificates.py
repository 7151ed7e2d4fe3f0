"""Tests how the metrics server's certificate is made and checked. The clock is a number here."""

import base64
import ssl
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509

from conveyor_operator.metrics_api.certificates import (
    KEEP_OLD_AUTHORITY,
    LIFETIME,
    RENEW_AFTER,
    DropOld,
    Issue,
    Keep,
    Serving,
    find_fault,
    issue,
    plan_certificate,
    read_authorities,
)

HOSTS = ("conveyor-metrics.conveyor-system.svc", "conveyor-metrics.conveyor-system.svc.cluster.local")
START = datetime(2026, 11, 21, 8, 0, 0, tzinfo=UTC)


@pytest.fixture(scope="module")
def serving() -> Serving:
    return issue(HOSTS, START)


def test_a_new_pair_is_without_fault_and_kept_for_two_thirds_of_its_life(serving: Serving) -> None:
    assert find_fault(serving, HOSTS, START) == ""
    assert plan_certificate(serving, HOSTS, START) == Keep(START + RENEW_AFTER)
    assert serving.expires_at == START + LIFETIME


def test_a_pair_that_is_missing_old_or_faulty_is_replaced(serving: Serving) -> None:
    assert plan_certificate(None, HOSTS, START) == Issue("no certificate exists")
    assert plan_certificate(serving, HOSTS, START + RENEW_AFTER) == Issue("two thirds of its lifetime have passed")
    assert plan_certificate(serving, HOSTS, START + LIFETIME) == Issue("the current certificate has expired")
    assert plan_certificate(serving, ("elsewhere.svc",), START) == Issue("the current certificate is for another name")


def test_the_old_authority_is_dropped_after_an_hour(serving: Serving) -> None:
    later = START + RENEW_AFTER
    new = issue(HOSTS, later)
    both = replace(new, bundle=new.bundle + serving.bundle)
    assert plan_certificate(both, HOSTS, later) == Keep(later + KEEP_OLD_AUTHORITY)
    assert plan_certificate(both, HOSTS, later + KEEP_OLD_AUTHORITY) == DropOld(new.bundle)


def on_a_curve_of_nobody(key: bytes) -> bytes:
    first, *lines, last = key.decode().splitlines()
    p256, nobodys = bytes.fromhex("2a8648ce3d030107"), bytes.fromhex("2a8648ce3d030170")
    body = base64.encodebytes(base64.b64decode("".join(lines)).replace(p256, nobodys)).decode()
    return "\n".join((first, body.strip(), last, "")).encode()


def test_what_is_wrong_with_a_pair_is_found(serving: Serving) -> None:
    other = issue(HOSTS, START)
    assert "cannot be loaded" in find_fault(replace(serving, certificate=b"no certificate"), HOSTS, START)
    assert "cannot be loaded" in find_fault(replace(serving, bundle=other.bundle), HOSTS, START)
    assert "cannot be loaded" in find_fault(replace(serving, key=b"no key"), HOSTS, START)
    assert "cannot be loaded" in find_fault(replace(serving, key=on_a_curve_of_nobody(serving.key)), HOSTS, START)
    assert "does not match the certificate" in find_fault(replace(serving, key=other.key), HOSTS, START)
    assert "another name" in find_fault(serving, ("elsewhere.svc",), START)
    assert "expired" in find_fault(serving, HOSTS, START + LIFETIME)


def test_the_authorities_of_a_bundle_are_read_one_by_one(serving: Serving) -> None:
    other = issue(HOSTS, START)
    assert read_authorities(other.bundle + serving.bundle) == [other.bundle, serving.bundle]
    assert read_authorities(b"nonsense") == read_authorities(b"") == []


def test_strict_clients_accept_the_chain(serving: Serving, tmp_path) -> None:
    now = issue(HOSTS, datetime.now(UTC))
    pair = tmp_path / "pair.pem"
    pair.write_bytes(now.certificate + now.key)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(pair)
    client = ssl.create_default_context(cadata=now.bundle.decode())
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    assert shake_hands(client, server, HOSTS[0])
    wrong = ssl.create_default_context(cadata=serving.bundle.decode())
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(wrong, server, HOSTS[0])
    both = ssl.create_default_context(cadata=(serving.bundle + now.bundle).decode())
    assert shake_hands(both, server, HOSTS[0])


def test_only_the_leaf_may_serve_and_only_the_authority_may_sign(serving: Serving) -> None:
    leaf, authority = (x509.load_pem_x509_certificate(pem) for pem in (serving.certificate, serving.bundle))
    assert not leaf.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    constraints = authority.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert (constraints.ca, constraints.path_length) == (True, 0)
    assert leaf.not_valid_before_utc == START - timedelta(hours=2), "the API server's clock may be behind"


def shake_hands(client: ssl.SSLContext, server: ssl.SSLContext, host: str) -> bool:
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname=host),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    done = [False, False]
    for _ in range(10):
        for number, end in enumerate(ends):
            try:
                end.do_handshake()
                done[number] = True
            except ssl.SSLWantReadError:
                continue
    return all(done)
