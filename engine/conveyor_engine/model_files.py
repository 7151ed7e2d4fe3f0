"""Reads the JSON files of a model's directory, all by one rule. Used wherever one is read; knows none of them."""

import json
from pathlib import Path
from typing import Any, TypeVar

from conveyor_engine.errors import ModelError

_MAX_BYTES = 16 << 20  # of a file; they have a few KiB, config.json with many labels a few MiB
_Content = TypeVar("_Content", dict[str, Any], list[Any])


def read_object(path: Path) -> dict[str, Any]:
    """Empty if there is no such file. Raises ModelError for one that is no JSON object or has more than 16 MiB."""
    return _read(path, {}, "object")


def read_list(path: Path) -> list[Any]:
    """As `read_object`, of a file that holds a list."""
    return _read(path, [], "list")


def _read(path: Path, empty: _Content, name: str) -> _Content:
    if not path.is_file():
        return empty
    try:
        if (num_bytes := path.stat().st_size) > _MAX_BYTES:
            raise ValueError(f"it has {num_bytes} bytes, and may have {_MAX_BYTES}")
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, type(empty)):
        raise ModelError(f"{path} cannot be read: it is not a JSON {name}")
    return content
