"""Reads OpenAPI documents."""

from collections.abc import Iterator
from typing import Any


def find_references(value: object) -> Iterator[str]:
    """Return every `$ref` in a document."""
    if isinstance(value, dict):
        if isinstance(reference := value.get("$ref"), str):
            yield reference
        for each in value.values():
            yield from find_references(each)
    elif isinstance(value, list):
        for each in value:
            yield from find_references(each)


def find_event_schema(operation: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of the JSON in each event of an operation's stream."""
    item = operation["responses"]["200"]["content"]["text/event-stream"]["itemSchema"]
    schema: dict[str, Any] = item["properties"]["data"]["anyOf"][0]["contentSchema"]
    return schema
