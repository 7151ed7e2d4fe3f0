"""Runs docs/measuring.md's command for the budget of the gateway's event loop. The test does not check times."""

import json

import pytest
from tests.bench.commands import run


@pytest.mark.slow
def test_each_parser_and_each_kind_of_work_has_a_row() -> None:
    result = json.loads(run("loop", "--services 200").splitlines()[-1])
    names = {row["name"].partition(":")[0].partition(" ")[0] for row in result["rows"]}
    assert names >= {"JSON", "form", "X-Forwarded-For", "chunks", "/metrics", "/v1/models", "/demand", "choice"}
    for row in result["rows"]:
        assert any(row[figure] is not None for figure in ("request_ms", "mib_ms", "turn_ms"))
