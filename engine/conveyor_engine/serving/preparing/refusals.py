"""Turns pydantic's validation errors into one sentence for the client.

Used by `jobs`, `forms` and `sampling_defaults`.
"""

from collections.abc import Sequence

from pydantic import ValidationError

from conveyor_engine.errors import ErrorCode, InvalidRequest

_IN_JSON = {  # replacements for messages with Python's names of types
    "model_type": "must be an object",
    "dict_type": "must be an object",
    "list_type": "must be an array",
}


def invalid_request(error: ValidationError) -> InvalidRequest:
    """Return the first error that pydantic found, as a sentence that begins with the field."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    message, kind = first["msg"], first["type"]
    path = _field_path(first["loc"])
    if not path:
        own = kind if kind in message else None  # an error about several fields has a field's name as its type
        return InvalidRequest(message if own else "the body must be a JSON object", param=own)
    code = ErrorCode.UNSUPPORTED_VALUE if kind == "unsupported" else ErrorCode.INVALID_VALUE
    return InvalidRequest(f"{path} {_IN_JSON.get(kind) or _as_predicate(message)}", param=path, code=code)


def _field_path(location: Sequence[int | str]) -> str:
    """Return the field's path, such as messages[0].content, without the names of union members."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() or part.endswith("[]"):
            path += f".{part}" if path else part
    return path


def _as_predicate(message: str) -> str:
    """Turn pydantic's "Input should be ..." into a sentence without its subject: "must be ..."."""
    if message == "Field required":
        return "is missing"
    return message.replace("Input should", "must", 1)
