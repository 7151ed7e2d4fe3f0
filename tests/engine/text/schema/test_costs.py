"""Tests limits on what a schema or grammar may cost."""

from typing import Any

import pytest

from conveyor_engine.errors import InvalidRequest
from conveyor_engine.text.grammar import build_grammar

INTEGER = {"type": "integer"}
A = {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}


def nest(depth: int) -> dict[str, Any]:
    """A schema whose references lead to one another."""
    steps = {f"d{number}": {"items": {"$ref": f"#/$defs/d{number + 1}"}} for number in range(depth)}
    return {"$defs": {**steps, f"d{depth}": INTEGER}, "$ref": "#/$defs/d0"}


def test_schemas_that_lead_too_deep_are_refused() -> None:
    assert build_grammar("json", nest(100), "form")
    for depth in (300, 5_000):
        with pytest.raises(InvalidRequest, match="more than 256 levels deep"):
            build_grammar("json", nest(depth), "form")


CHAIN = "start: r0\n" + "\n".join(f'r{number}: "x" r{number + 1}' for number in range(2_673)) + '\nr2673: "y"'
AND = " & ".join(f"/(?s:.*)[a-z]{{{number}}}(?s:.*)/" for number in range(1, 30))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (CHAIN, "has 2675 rules, more than 1024"),
        (f"start: A\nA: {AND}", "has 28 intersections of terminals, more than 16"),
        ("start: " + "(" * 129 + '"a"' + ")" * 129, "more than 128 levels deep"),
    ],
    ids=["rules", "intersections", "brackets"],
)
def test_grammars_that_cost_too_much_to_compile_are_refused(text: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        build_grammar("grammar", text, "form")


def test_what_a_text_contains_counts_for_nothing() -> None:
    assert build_grammar("grammar", f'start: "{"&~((" * 100}" /[&(]+/ // {"&" * 50}', "form")


def test_equal_branches_are_compiled_once() -> None:
    one, many = ({"anyOf": [{"type": "string"}] * times + [INTEGER]} for times in (1, 200))
    assert build_grammar("json", one, "form") == build_grammar("json", many, "form")


def refer_twice(depth: int, keyword: str) -> Any:
    """Return definitions of which each refers to the next one twice."""
    names = {
        str(number): {"type": "object", keyword: [{"$ref": f"#/$defs/{number + 1}"}] * 2} for number in range(depth)
    }
    return {"$ref": "#/$defs/0", "$defs": {**names, str(depth): A}}


@pytest.mark.parametrize("keyword", ["allOf", "anyOf"])
def test_definitions_that_refer_twice_are_rewritten_once(keyword: str) -> None:
    """Without that, 30 definitions would take a billion steps, or be relaxed."""
    grammar = build_grammar("json", refer_twice(30, keyword), "form")
    assert len(grammar.text) < 20_000
    assert grammar.relaxed == []
