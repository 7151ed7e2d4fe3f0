"""Generated requests to each route: which routes of a document an engine has, and how a run's report is read."""

import json
from pathlib import Path

import pytest

from conveyor_engine.serving.http.openapi import build_document
from conveyor_protocol.tasks import TASKS
from e2e.openapi_fuzz.documents import Route, restrict, simplify
from e2e.openapi_fuzz.models import MODELS
from e2e.openapi_fuzz.tool import CHECKS, Result, Tool, _read

INFER = Route("POST", "/v2/models/{model}/infer")


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


@pytest.mark.parametrize("beginning", [None, "", '{"test_cases": '])
def test_a_run_that_ends_before_its_report_is_a_failure(tmp_path: Path, beginning: str | None) -> None:
    program = tmp_path / "schemathesis"
    report, log = (tmp_path / f"POST_v2_models_{{model}}_infer.{ending}" for ending in ("json", "log"))
    program.write_text("#!/bin/sh\n" + ("" if beginning is None else f"printf '{beginning}' >'{report}'\n"))
    program.chmod(0o755)
    tool = Tool(program, "demo", "http://127.0.0.1:9", None, build_document(), tmp_path, CHECKS, 1, 60)
    assert tool.run(INFER, 1).failures == [f"schemathesis wrote no whole report: see {log}"]


def test_each_task_has_a_model() -> None:
    assert {model.task for model in MODELS.values()} == set(TASKS)
