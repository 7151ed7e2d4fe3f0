"""Issues and checks the metrics server's serving certificate, and plans its rotation. Pure.

Every certificate has its own authority, whose key is discarded immediately, so both are always renewed together. Age or
a fault causes a rotation, which has three steps (tested on a real API server): add the new authority to the
APIServices' caBundle beside the old one, write the new leaf, and remove the old authority an hour later.

`ca.crt` in the Secret is the same bundle, newest authority first. So the Secret alone shows the progress of a rotation.

Used by `keeper` and `server`. The caller passes the time.
"""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import cast

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

LIFETIME = timedelta(days=90)
RENEW_AFTER = LIFETIME * 2 / 3
KEEP_OLD_AUTHORITY = timedelta(hours=1)  # longer than kubelet and server need to load a changed Secret
_CLOCK_SKEW = timedelta(hours=2)  # by which the operator's clock may be ahead of the API server's


@dataclass(frozen=True, slots=True)
class Serving:
    """A leaf certificate, its key, and the bundle of authorities that clients should trust, all in PEM."""

    certificate: bytes
    key: bytes
    bundle: bytes

    @property
    def expires_at(self) -> datetime:
        return x509.load_pem_x509_certificate(self.certificate).not_valid_after_utc

    @property
    def issued_at(self) -> datetime:
        return x509.load_pem_x509_certificate(self.certificate).not_valid_before_utc + _CLOCK_SKEW


@dataclass(frozen=True, slots=True)
class Issue:
    """The plan to issue a new certificate."""

    reason: str


@dataclass(frozen=True, slots=True)
class DropOld:
    """The plan to trust only the newest authority."""

    bundle: bytes


@dataclass(frozen=True, slots=True)
class Keep:
    """The plan to keep the certificate at least until `until`."""

    until: datetime


def plan_certificate(serving: Serving | None, hosts: tuple[str, ...], now: datetime) -> Issue | DropOld | Keep:
    """Return what to do next. `serving`: None if the Secret is incomplete."""
    if serving is None:
        return Issue("no certificate exists")
    fault = find_fault(serving, hosts, now)
    if fault:
        return Issue(fault)
    renew_at = serving.issued_at + RENEW_AFTER
    if now >= renew_at:
        return Issue("two thirds of its lifetime have passed")
    authorities = x509.load_pem_x509_certificates(serving.bundle)
    drop_at = serving.issued_at + KEEP_OLD_AUTHORITY
    if len(authorities) == 1:
        return Keep(renew_at)
    if now >= drop_at:
        return DropOld(_pem(authorities[0]))
    return Keep(drop_at)


def find_fault(serving: Serving, hosts: tuple[str, ...], now: datetime) -> str:
    """Return why this pair cannot be used; "" if it can."""
    try:
        leaf = x509.load_pem_x509_certificate(serving.certificate)
        key = serialization.load_pem_private_key(serving.key, password=None)
        authorities = x509.load_pem_x509_certificates(serving.bundle)
        leaf.verify_directly_issued_by(authorities[0])
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        is_pair = leaf.public_key() == cast(ec.EllipticCurvePrivateKey, key).public_key()
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm, x509.ExtensionNotFound) as error:
        return f"the current certificate cannot be loaded: {error!r}"
    if not is_pair:
        return "the current key does not match the certificate"
    if not set(hosts) <= set(names.get_values_for_type(x509.DNSName)):
        return "the current certificate is for another name"
    if now >= min(leaf.not_valid_after_utc, authorities[0].not_valid_after_utc):
        return "the current certificate has expired"
    return ""


def issue(hosts: tuple[str, ...], now: datetime) -> Serving:
    """Return a new authority, and a leaf for `hosts`, signed by this authority. The authority's key is discarded."""
    authority_key, leaf_key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"conveyor-metrics {now:%Y-%m-%d}")])
    authority = (
        _builder(subject, subject, authority_key.public_key(), authority_key.public_key(), now)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(key_cert_sign=True), critical=True)
        .sign(authority_key, hashes.SHA256())
    )
    leaf_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0][:64])])
    leaf = (
        _builder(leaf_name, subject, leaf_key.public_key(), authority_key.public_key(), now)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host) for host in hosts]), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    key = leaf_key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return Serving(_pem(leaf), key, _pem(authority))


def read_authorities(bundle: bytes) -> list[bytes]:
    """Return the certificates of a bundle, newest first; empty if the bundle is invalid."""
    try:
        return [_pem(authority) for authority in x509.load_pem_x509_certificates(bundle)]
    except ValueError:
        return []


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    authority_key: ec.EllipticCurvePublicKey,
    now: datetime,
) -> x509.CertificateBuilder:
    now = now.astimezone(UTC).replace(microsecond=0)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + LIFETIME)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key), critical=False)
    )


def _key_usage(*, key_cert_sign: bool = False, digital_signature: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=key_cert_sign,
        crl_sign=key_cert_sign,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
