"""ServedName: a namespace's claim to a name at the gateway's root, and the names that a namespace may claim.

The operator creates it; operator and gateway read it. Pure.
"""

import hashlib
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Final, Literal, Self

from pydantic import ValidationError

from conveyor_api import names
from conveyor_api.base import ApiModel, Rule
from conveyor_api.errors import InvalidResource
from conveyor_api.model import ModelName
from conveyor_api.resource import Metadata

_LABEL: Final = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
# A name of this form may be the `namespace/name` of a service that exists or will exist, perhaps with an adapter.
_SERVICE_KEY: Final = re.compile(rf"({_LABEL})/{_LABEL}(?::.*)?")
_SLUG_CHARACTERS: Final = 40


class ServedNameSpec(ApiModel):
    """The claimed name."""

    rules: ClassVar = (Rule("self == oldSelf", "a ServedName cannot change; delete it to release the name"),)

    name: ModelName
    """Name that clients put in `model` at the gateway's root."""


class ServedName(ApiModel):
    """A name at the gateway's root that belongs to this namespace. Made by the operator; deleting it releases the
    name."""

    api_version: Literal["conveyor.dev/v1alpha1"] = names.API_VERSION
    kind: Literal["ServedName"] = names.SERVED_NAME_KIND
    metadata: Metadata
    spec: ServedNameSpec

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        """Parse `body`, JSON from the API server, as a claim. Raises InvalidResource."""
        try:
            return cls.model_validate(dict(body), by_alias=True, by_name=False, extra="ignore")
        except ValidationError as error:
            raise InvalidResource.of(error) from error


def may_claim(namespace: str, name: str) -> bool:
    """Return whether the namespace may claim the name. Names that begin with `other-namespace/name` are not
    allowed."""
    match = _SERVICE_KEY.fullmatch(name)
    return match is None or match[1] == namespace


def object_name(name: str) -> str:
    """Return the object name for a served name: the name itself if Kubernetes allows it, else a readable part and a
    hash.

    Only the second form has a dot. So two names get the same object name only if their hashes collide.
    """
    if re.fullmatch(_LABEL, name):
        return name
    slug = re.sub("[^a-z0-9]+", "-", name.lower())[:_SLUG_CHARACTERS].strip("-")
    return f"{slug}.{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def build_served_name(namespace: str, name: str, *, is_unserved: bool = False) -> dict[str, Any]:
    """Return the manifest of a claim. is_unserved: mark it as one that expires, until a service with it is Ready."""
    labels = {names.MANAGED_BY_LABEL: "conveyor"}
    metadata: dict[str, Any] = {"name": object_name(name), "namespace": namespace, "labels": labels}
    if is_unserved:
        metadata["annotations"] = {names.UNSERVED_ANNOTATION: "true"}
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.SERVED_NAME_KIND,
        "metadata": metadata,
        "spec": {"name": name},
    }


def root_name(system_namespace: str) -> str:
    """Return the served name that the operator must claim before gateways become ready.

    The operator claims this name after the names of all services. So in an upgrade to the first release with claims,
    every service keeps its name.
    """
    return f"{system_namespace}/{names.GATEWAY_SERVICE}"
