"""A request to a service, and the `curl` command that sends the same. Pure."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from shlex import quote
from typing import Any, Final, Literal

from conveyor_console.playground.fields import Upload
from conveyor_protocol.request_headers import RECEIPT_HEADER

_LINE_END: Final = " \\\n  "
_MAX_COMMAND: Final = 32 << 10  # characters; Linux runs no command with an argument of more than 128 KiB

Reading = Literal["events", "embeddings", "ranking", "labels", "image labels", "pictures", "tensors"]


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """A POST. With `body`, it is JSON; otherwise a form with `parts` and the file, whose part is `file_part`."""

    path: str
    reading: Reading
    """How to read the answer."""
    body: Any = None
    parts: Sequence[tuple[str, str]] = ()
    file_part: str = ""
    upload: Upload | None = None
    inputs: Sequence[str] = ()
    """The texts that the answer's items belong to."""
    message: str = ""
    """In a chat, what the caller said last."""


def write_curl(url: str, request: ApiRequest, has_key: bool) -> str:
    """Return the command, or a comment if it is too long. url: the service's. It has a shell variable for the key."""
    parts = [f"curl -N {quote(url + request.path)}", f"-H {quote(f'{RECEIPT_HEADER}: true')}"]
    if has_key:
        parts.append('-H "Authorization: Bearer $KEY"')
    if request.body is not None:
        parts.append("-H 'Content-Type: application/json'")
        parts.append(f"-d {quote(json.dumps(request.body, ensure_ascii=False))}")
    parts += [f"--form-string {quote(f'{name}={value}')}" for name, value in request.parts]
    if request.upload is not None:
        parts.append(f"-F {quote(f'{request.file_part}=@{request.upload.name}')}")
    command = _LINE_END.join(parts)
    return command if len(command) <= _MAX_COMMAND else "# The request is too long to be shown as a command."
