"""Makes the certificates of a cluster: two authorities, their certificates, and the service account key.

Called once when a cluster starts. The keys are elliptic curve keys, so that this takes milliseconds. Knows no process
and no port.
"""

import base64
import datetime
import ipaddress
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_LIFETIME = datetime.timedelta(days=365)
_BACKDATED = datetime.timedelta(days=1)  # programs whose clocks are hours behind accept the certificates too


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Paths of a PEM certificate and of its private key."""

    certificate: Path
    key: Path


class Authority:
    """A certificate authority that keeps its files in a folder."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _subject(name)
        builder = _builder(self._name, self._name, self._key.public_key(), self._key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self.certificate = folder / f"{name}.crt"
        self.certificate.write_bytes(_pem(builder.sign(self._key, hashes.SHA256())))

    def issue(
        self,
        file: str,
        common_name: str,
        group: str = "",
        names: Sequence[str] = (),
        lifetime: datetime.timedelta = _LIFETIME,
    ) -> KeyPair:
        """Issue a certificate for client and server use. `names` are its DNS names and IP addresses."""
        key = ec.generate_private_key(ec.SECP256R1())
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH])
        authority_key = self._key.public_key()
        builder = _builder(_subject(common_name, group), self._name, key.public_key(), authority_key, lifetime)
        builder = builder.add_extension(usage, critical=False)
        if names:
            alternative = x509.SubjectAlternativeName([_general_name(name) for name in names])
            builder = builder.add_extension(alternative, critical=False)
        pair = KeyPair(self._folder / f"{file}.crt", self._folder / f"{file}.key")
        pair.certificate.write_bytes(_pem(builder.sign(self._key, hashes.SHA256())))
        write_private_key(pair.key, key)
        return pair


def write_service_account_key(folder: Path) -> tuple[Path, Path]:
    """Write the key that signs service account tokens. Returns the paths of (public key, private key)."""
    key = ec.generate_private_key(ec.SECP256R1())
    public, private = folder / "service-account.pub", folder / "service-account.key"
    encoding, form = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    public.write_bytes(key.public_key().public_bytes(encoding, form))
    write_private_key(private, key)
    return public, private


def write_private_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    path.touch(mode=0o600)
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )


def write_kubeconfig(path: Path, context: str, server: str, authority: Path, pair: KeyPair) -> Path:
    """Write a kubeconfig that contains its certificates, so that copies of it work anywhere."""
    user = {"client-certificate-data": _base64(pair.certificate), "client-key-data": _base64(pair.key)}
    cluster = {"server": server, "certificate-authority-data": _base64(authority)}
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": context,
        "contexts": [{"name": context, "context": {"cluster": context, "user": context}}],
        "clusters": [{"name": context, "cluster": cluster}],
        "users": [{"name": context, "user": user}],
    }
    path.touch(mode=0o600)
    path.write_text(json.dumps(content, indent=1))
    return path


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    authority_key: ec.EllipticCurvePublicKey,
    lifetime: datetime.timedelta = _LIFETIME,
) -> x509.CertificateBuilder:
    """Return a certificate with the identifiers of both keys, by which clients tell authorities of one name apart."""
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + lifetime)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key), critical=False)
    )


def _subject(common_name: str, group: str = "") -> x509.Name:
    attributes = [x509.NameAttribute(NameOID.COMMON_NAME, common_name)]
    if group:
        attributes.append(x509.NameAttribute(NameOID.ORGANIZATION_NAME, group))
    return x509.Name(attributes)


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _base64(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()
