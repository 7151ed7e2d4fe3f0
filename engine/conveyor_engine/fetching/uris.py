"""Parses `model.uri`. It accepts exactly the addresses that the resource's API accepts.

tests/contract/test_spec_reaches_engine.py compares `parse_uri` with the API.
"""

import re
from typing import NamedTuple

from conveyor_engine.errors import ConfigError

DEFAULT_REVISION = "main"
_SEGMENT = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}"
_REVISION = r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}"
_PATH = r"(?:/[A-Za-z0-9_@+=.-]+)+"
_FILE = "[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
_HUB = re.compile(rf"hf://(?P<repository>{_SEGMENT}/{_SEGMENT})(?:@(?P<revision>{_REVISION}))?(?::(?P<file>{_FILE}))?")
_BUCKET = re.compile(rf"s3://(?P<bucket>[a-z0-9][a-z0-9.-]{{1,61}}[a-z0-9])(?P<path>{_PATH})")
_CLAIM = re.compile(rf"pvc://[a-z0-9](?:[a-z0-9.-]{{0,251}}[a-z0-9])?{_PATH}")


_IMAGE = re.compile(
    r"oci://[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?(?::[0-9]{1,5})?(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)+"
    rf"(?::[A-Za-z0-9_][A-Za-z0-9._-]{{0,127}})?(?:@sha256:[0-9a-f]{{64}})?(?:/{_PATH})?"
)


class HubUri(NamedTuple):
    """The address of a repository on a hub: hf://organisation/name[@revision][:file]."""

    repository: str
    revision: str
    file: str  # the name of a GGUF file, or its end; "" if the uri names none


class BucketUri(NamedTuple):
    """The address of a folder in a bucket: s3://bucket/prefix."""

    bucket: str
    prefix: str


def find_mounted_path(uri: str) -> str:
    """Return the path of the model inside its volume or image; empty for a whole image."""
    scheme, _, rest = uri.partition("://")
    return rest.partition("//" if scheme == "oci" else "/")[2]


def parse_uri(uri: str) -> HubUri | BucketUri | None:
    """Parse the address. Return None for a claim or an image, which are mounted. Raises ConfigError."""
    climbs = bool({".", ".."} & set(uri.split("/")))
    if (_CLAIM.fullmatch(uri) or _IMAGE.fullmatch(uri)) and not climbs:
        return None
    if (match := _BUCKET.fullmatch(uri)) and not climbs:
        return BucketUri(match["bucket"], match["path"][1:])
    if (match := _HUB.fullmatch(uri)) and ".." not in uri:
        return HubUri(match["repository"], match["revision"] or DEFAULT_REVISION, match["file"] or "")
    raise ConfigError(
        f"--uri: {uri!r} is neither hf://organisation/name[@revision][:file], nor s3://bucket/prefix, nor "
        "pvc://claim/path, nor oci://registry/repository[:tag][@digest][//path]"
    )
