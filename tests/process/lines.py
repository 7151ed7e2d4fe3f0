"""Reads log lines as users' own programs for logfmt or JSON would."""

import json
import re
from typing import Any

_PAIR = re.compile(r'([a-z][a-z0-9_]*)=(?:("(?:[^"\\]|\\.)*")|([^\s"=]+))(?: |$)')


def read_logfmt(line: str) -> dict[str, Any]:
    """Return the pairs of a line. Raises AssertionError if the line has anything else."""
    pairs, end = {}, 0
    while end < len(line):
        match = _PAIR.match(line, end)
        assert match is not None, line[end:]
        assert match[1] not in pairs, line
        pairs[match[1]] = json.loads(match[2]) if match[2] else match[3]
        end = match.end()
    return pairs


def read_json(line: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(line)
    return content
