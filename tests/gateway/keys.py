"""Makes keys and the bodies of their APIKeys for tests."""

from typing import Any

from conveyor_api import names
from conveyor_api.api_key import build_key, hash_key

Json = dict[str, Any]


def make_key(namespace: str, number: int = 1) -> str:
    """Return a key that is always the same for a namespace and number."""
    return build_key(namespace, number.to_bytes(32, "big"))


def make_api_key(namespace: str, name: str = "ci", *keys: str, **spec: Any) -> Json:
    """Return an APIKey for these keys, by default for the first one of its namespace."""
    hashes = [{"sha256": hash_key(key)} for key in keys or (make_key(namespace),)]
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.API_KEY_KIND,
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"hashes": hashes, **spec},
    }
