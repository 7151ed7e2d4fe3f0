"""Reads the credentials of a download from the files of a mounted Secret. Used by `fetch`.

Each file has the name of a variable and its value. It becomes this variable of the process, where the libraries look
for it. The folder has the Secret's name. A missing Secret is an empty folder, so that the status has the message of
this module.
"""

import os
from pathlib import Path

from conveyor_engine.errors import ModelError
from conveyor_engine.fetching.uris import HubUri, parse_uri
from conveyor_protocol.failure_reasons import FailureReason

_HUB = ("HF_TOKEN",)
_BUCKET = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
_BUCKET_OPTIONAL = ("AWS_SESSION_TOKEN", "AWS_REGION", "AWS_ENDPOINT_URL")


def use_credentials(uri: str, folder: Path) -> None:
    """Set the variables for the source of `uri`. Raises ModelError (SecretNotFound) without values in the message."""
    is_hub = isinstance(parse_uri(uri), HubUri)
    required, optional = (_HUB, ()) if is_hub else (_BUCKET, _BUCKET_OPTIONAL)
    found = {name: _read(folder, name) for name in (*required, *optional) if (folder / name).is_file()}
    if missing := [name for name in required if name not in found]:
        keys = "the key of secretRef.key (token by default)" if is_hub else " and ".join(missing)
        raise _refuse(f"Secret {folder.name} does not exist in this namespace, or lacks {keys}")
    os.environ.update(found)


def _read(folder: Path, name: str) -> str:
    try:
        value = (folder / name).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise _refuse(f"{name} of Secret {folder.name} cannot be read: {type(error).__name__}") from error
    if "\0" in value:
        raise _refuse(f"{name} of Secret {folder.name} has a NUL byte")
    return value


def _refuse(message: str) -> ModelError:
    return ModelError(message, reason=FailureReason.SECRET_NOT_FOUND)
