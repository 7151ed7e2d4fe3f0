"""Reads OpenAPI documents."""

from collections.abc import Iterator


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
