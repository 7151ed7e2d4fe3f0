"""Each reason that an engine gives for its end is one that the operator knows, and puts into the conditions."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.operator.builders import ended, make_pod

import conveyor_engine
from conveyor_api.conditions import ENGINE_FAILURES, MODEL_FAILURES
from conveyor_engine import errors
from conveyor_engine.loop.process import _reason
from conveyor_operator.inferenceservice.failures import find_failure

ENGINE = Path(conveyor_engine.__file__).parent
DRAWN = re.findall(r"(?:ConfigError|ModelError) +(\w[\w, ]+)", errors.__doc__ or "")  # in the tree of errors


def find_reasons(file: Path) -> Iterator[str]:
    """What a file gives as a `reason`: as a keyword, as a default, or as the first half of a `Death`."""
    for node in ast.walk(ast.parse(file.read_text())):
        given: list[ast.expr | None] = []
        if isinstance(node, ast.Call):
            given = [keyword.value for keyword in node.keywords if keyword.arg == "reason"]
            if isinstance(node.func, ast.Name) and node.func.id == "Death":
                given += node.args[:1]
        elif isinstance(node, ast.FunctionDef):
            named = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
            given = [default for argument, default in named if argument.arg == "reason"]
        yield from (value.value for value in given if isinstance(value, ast.Constant) and isinstance(value.value, str))


SAID = {reason for file in ENGINE.rglob("*.py") for reason in find_reasons(file)}
SAID |= {_reason(MemoryError()), _reason(ValueError())}


@pytest.mark.parametrize("reason", sorted(SAID))
def test_a_reason_that_the_engine_writes_is_one_that_the_user_reads(reason: str) -> None:
    failure = find_failure(make_pod("pod", ended(json.dumps({"reason": reason, "message": "why"}))))
    assert failure is not None
    assert (failure.reason, failure.message) == (reason, "why")


def test_the_engine_writes_every_reason_that_is_promised_of_it_and_draws_it_in_its_tree() -> None:
    assert SAID == MODEL_FAILURES | ENGINE_FAILURES
    made = {"EngineError", "OOMKilled"}  # not raised, but made of what nobody expected, or of a process that is gone
    assert set(", ".join(DRAWN).split(", ")) == SAID - made
