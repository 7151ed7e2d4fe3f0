"""What the metrics server shows to the world: the pair in its Secret, and whether its Service answers with it.

Used by `keeper` and `registrar`. Knows no APIService.
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
    """The pair in a Secret; None if a part is missing or is no base64."""
    parts = [decode(secret, key) for key in (CERTIFICATE_KEY, PRIVATE_KEY, BUNDLE_KEY)]
    return Serving(*parts) if all(parts) else None


def decode(secret: Object, key: str) -> bytes:
    """A value of the Secret; empty if it is missing or no base64."""
    try:
        return base64.b64decode((secret.get("data") or {}).get(key, ""))
    except ValueError:
        return b""


def find_port(service: Object) -> int:
    """The Service's port of the API."""
    ports = service["spec"].get("ports") or ()
    return next(
        (port["port"] for port in ports if port.get("name") == names.METRICS_PORT_NAME), names.METRICS_SERVICE_PORT
    )


async def probe(service: Object, host: str, bundle: bytes) -> str:
    """Why the API server would not trust what answers at the Service; empty if it would.

    Goes where the API server goes: to the Service's address, as `host`, with the bundle of the APIServices.
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
