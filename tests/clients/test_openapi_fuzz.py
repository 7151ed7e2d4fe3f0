"""Generated requests to each route: which routes of a document an engine has, and how a run's report is read."""

import json
from pathlib import Path

from conveyor_engine.serving.http.openapi import build_document
from e2e.openapi_fuzz.documents import Route, find_routes, read_document, restrict, simplify
from e2e.openapi_fuzz.tool import Result, _read

INFER = Route("POST", "/v2/models/{model}/infer")


def test_routes_of_two_documents_are_equal_whatever_their_parameters_are_called(tmp_path: Path) -> None:
    text = "openapi: 3.0.0\npaths:\n  '/v2/models/${MODEL_NAME}/infer':\n    post: {responses: {200: {}}}\n"
    (tmp_path / "a.yaml").write_text(text)
    (route,) = find_routes(read_document(tmp_path / "a.yaml"))
    assert str(route) == "POST /v2/models/{MODEL_NAME}/infer"
    assert route.pattern == INFER.pattern in {each.pattern for each in find_routes(build_document())}


def test_a_route_s_document_has_all_schemas_that_it_refers_to() -> None:
    document = restrict(simplify(build_document()), [INFER])
    assert list(document["paths"]) == [INFER.path]
    assert {"InferRequest", "InferInput", "InferAnswer", "OutputTensor"} <= set(document["components"]["schemas"])
    assert "ChatRequest" not in document["components"]["schemas"]


def test_a_report_s_failures_and_errors_are_found() -> None:
    result = Result("demo", str(INFER))
    _read(
        {
            "test_cases": {"generated": 7},
            "failures": [{"title": "Server error", "count": 2}],
            "errors": [{"title": "Schema Error"}],
            "operations": {"tested": 1},
        },
        result,
    )
    assert (result.cases, result.failures) == (7, ["Server error (2)", "Schema Error"])
    assert json.loads(json.dumps(result.as_json()))["route"] == str(INFER)
