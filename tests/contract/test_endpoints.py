"""Compares the gateway's table of paths with the paths that an engine serves."""

from typing import Any

import pytest

from conveyor_api.endpoints import ENDPOINTS, Endpoint, EndpointKind, find_endpoint
from conveyor_engine.serving.http.app import ROUTES
from conveyor_engine.serving.http.openapi import build_document
from conveyor_engine.serving.http.task_paths import load_task_paths
from conveyor_protocol.tasks import TASKS
from e2e.cluster.paths import REPOSITORY

DOCUMENT = ("GET", "/openapi.json")  # which FastAPI answers
OWN = {
    "/livez",
    "/readyz",
    "/load",
    "/adapters",
    "/steps",
    "/place",
    "/usage",
    "/metrics",
}  # of an engine, for the cluster
PAGE = (REPOSITORY / "docs" / "openai-api.md").read_text()


def test_an_engine_answers_every_path_of_the_catalogue_and_no_other() -> None:
    answered = {(method, path.replace("{model:path}", "{model}")) for method, path in ROUTES if path not in OWN}
    assert answered | {DOCUMENT} == {(endpoint.method, endpoint.path) for endpoint in ENDPOINTS}


def test_the_page_links_the_document_that_has_all_endpoints() -> None:
    assert "`GET /openapi.json`" in PAGE
    assert {path for _, path in ROUTES if path not in OWN} <= {
        path.replace("{model}", "{model:path}") for path in build_document()["paths"]
    }


def test_no_path_is_in_the_catalogue_twice() -> None:
    assert all(find_endpoint(endpoint.path) is endpoint for endpoint in ENDPOINTS)


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: endpoint.path)
def test_the_page_of_the_api_names_it(endpoint: Endpoint) -> None:
    assert f"{endpoint.method} {endpoint.path}" in PAGE or f"`{endpoint.path}`" in PAGE


def test_an_id_of_a_model_may_have_slashes() -> None:
    assert (found := find_endpoint("/v1/models/meta/llama")) is not None
    assert found.kind is EndpointKind.GET_MODEL


def test_the_catalogue_knows_the_tasks_that_answer_each_path() -> None:
    tasks = load_task_paths()
    for endpoint in (each for each in ENDPOINTS if each.kind is EndpointKind.ENGINE):
        answer = {task for task, own in tasks.items() if any(path.path == endpoint.path for path in own.paths)} or {
            task for task, own in tasks.items() if own.inference and endpoint.path.endswith("/infer")
        }
        suiting = {task.lower() for task in TASKS if endpoint.suits(task)}
        assert suiting == answer, endpoint.path
        assert endpoint.suits(None)
        assert endpoint.suits("BroughtByAPackage")


def test_the_catalogue_has_the_fields_that_an_engine_requires() -> None:
    document = build_document()
    for endpoint in (each for each in ENDPOINTS if each.kind is EndpointKind.ENGINE):
        used = document["paths"][endpoint.path]["post"]["requestBody"]["content"].get("application/json")
        needed = find_required(document, used["schema"]) if used else {frozenset()}
        assert (set(endpoint.required) or {frozenset()}) == needed, endpoint.path


def find_required(document: dict[str, Any], schema: dict[str, Any]) -> set[frozenset[str]]:
    """Return the sets of fields of which an object must have one whole."""
    schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    own = frozenset(schema.get("required", ()))
    choices = [one for each in (schema, *schema.get("allOf", ())) for one in each.get("oneOf", ())]
    return {own | fields for one in choices for fields in find_required(document, one)} or {own}
