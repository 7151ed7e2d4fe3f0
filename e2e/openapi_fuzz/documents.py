"""Reads OpenAPI documents, and finds the routes that an engine serves. Used by `__main__`."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml
from tests.openapi import find_references

METHODS = ("get", "post", "delete", "put", "patch")


@dataclass(frozen=True, slots=True)
class Route:
    """A method and a path, as the document writes them: `POST /v1/models/{model}`."""

    method: str
    path: str

    def __str__(self) -> str:
        return f"{self.method} {self.path}"

    @property
    def pattern(self) -> tuple[str, str]:
        """The route without the names of its parameters, so that two documents can be compared."""
        return self.method, re.sub(r"\{[^}]*\}", "{}", self.path)


def read_document(path: Path) -> dict[str, Any]:
    """Read a document in JSON or YAML. The Open Inference Protocol writes some parameters as `${NAME}` in paths."""
    document: dict[str, Any] = yaml.safe_load(path.read_text())
    document["paths"] = {name.replace("${", "{"): value for name, value in document["paths"].items()}
    return json.loads(json.dumps(document, default=str))  # type: ignore[no-any-return]  # keys of YAML may be numbers


def simplify(document: dict[str, Any]) -> dict[str, Any]:
    """Remove the rule of `tool_choice` from chats: schemathesis generates no bodies for it beside the other rules.

    Without the rule, the engine refuses more of the generated chats.
    """
    rules = document["components"]["schemas"]["ChatRequest"]["allOf"]
    rules[:] = [rule for rule in rules if "tool_choice" not in rule["if"]["properties"]]
    return document


def find_routes(document: dict[str, Any]) -> list[Route]:
    """Return all routes of the document."""
    return [
        Route(method.upper(), path)
        for path, operations in document["paths"].items()
        for method in METHODS
        if method in operations
    ]


def restrict(document: dict[str, Any], routes: Sequence[Route]) -> dict[str, Any]:
    """Return the document with these routes' paths and their schemas alone: schemathesis reads it in a tenth of the
    time."""
    paths = {route.path: document["paths"][route.path] for route in routes}
    components = document.get("components", {})
    schemas, needed, kept = components.get("schemas", {}), list(_find_schemas(paths)), dict[str, Any]()
    while needed:
        if (name := needed.pop()) not in kept and name in schemas:
            kept[name] = schemas[name]
            needed += _find_schemas(schemas[name])
    return document | {"paths": paths, "components": components | {"schemas": kept}}


def _find_schemas(value: object) -> Iterator[str]:
    """Yield the names of the schemas that a part of a document refers to."""
    return (reference.rpartition("/")[2] for reference in find_references(value))


def add_examples(document: dict[str, Any], values: dict[str, list[str]]) -> None:
    """Give each path parameter an example. Requests that test the limits of other fields then use it."""
    for item in document["paths"].values():
        rows = [
            *item.get("parameters", ()),
            *(row for method in METHODS for row in item.get(method, {}).get("parameters", ())),
        ]
        for row in rows:
            if row.get("in") == "path":
                row["example"] = values[row["name"]][0]


def find_path_parameters(document: dict[str, Any]) -> set[str]:
    """Return the names of all parameters in paths."""
    return {name for path in document["paths"] for name in re.findall(r"\{([^}]*)\}", path)}


def find_answered(http: httpx.Client, model: str, routes: list[Route]) -> Iterator[Route]:
    """Yield the routes that the engine's task has. For the others it responds with the error `wrong_task`."""
    for route in routes:
        if route.path == "/place":  # not called here, because it waits for a place
            yield route
            continue
        path = re.sub(r"\{[^}]*version[^}]*\}", "1", route.path, flags=re.IGNORECASE)
        path = re.sub(r"\{[^}]*\}", model, path)
        answer = http.post(path, json={}) if route.method == "POST" else http.get(path)
        if "wrong_task" not in answer.text:
            yield route
