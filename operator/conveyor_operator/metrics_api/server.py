"""Reads the metrics server's certificate from the Secret, and checks whether the server presents a trusted one.

Used by `keeper` and `registrar`. This module does not know APIServices.
"""

import asyncio
import base64
import ssl
from typing import Any

from conveyor_api import names
from conveyor_operator.metrics_api.certificates import Serving

Object = dict[str, Any]

CERTIFICATE_KEY, PRIVATE_KEY, BUNDLE_KEY = "tls.crt", "tls.key", "ca.crt"

_HANDSHAKE_SECONDS = 5.0


def read_serving(secret: Object) -> Serving | None:
    """Return the certificate, key and bundle in a Secret; None if a part is missing or not base64."""
    parts = [decode(secret, key) for key in (CERTIFICATE_KEY, PRIVATE_KEY, BUNDLE_KEY)]
    return Serving(*parts) if all(parts) else None


def decode(secret: Object, key: str) -> bytes:
    """Return a value of the Secret; b"" if it is missing or not base64."""
    try:
        return base64.b64decode((secret.get("data") or {}).get(key, ""))
    except ValueError:
        return b""


def find_port(service: Object) -> int:
    """Return the Service's port for the API."""
    ports = service["spec"].get("ports") or ()
    return next(
        (port["port"] for port in ports if port.get("name") == names.METRICS_PORT_NAME), names.METRICS_SERVICE_PORT
    )


async def probe(service: Object, host: str, bundle: bytes) -> str:
    """Connect as the API server does: to the Service's address, with the server name `host`, trusting only `bundle`.

    Returns why the API server would not trust the server; "" if it would.
    """
    spec = service["spec"]
    address = spec.get("externalName") or spec.get("clusterIP")
    try:
        async with asyncio.timeout(_HANDSHAKE_SECONDS):
            context = ssl.create_default_context(cadata=bundle.decode())
            _, writer = await asyncio.open_connection(address, find_port(service), ssl=context, server_hostname=host)
    except ssl.SSLCertVerificationError as error:
        return f"Service {names.METRICS_SERVICE} does not serve its certificate: {error.verify_message}"
    except (OSError, ValueError) as error:
        return f"Service {names.METRICS_SERVICE} does not answer over TLS: {type(error).__name__}"
    writer.transport.abort()
    return ""
