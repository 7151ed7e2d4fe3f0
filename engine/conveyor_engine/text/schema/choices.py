"""Rewrites `oneOf`, `not` and `if` with `anyOf`, `allOf` and complements. Pure. Used by `rewrite`."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from conveyor_engine.text.schema.closing import is_choice
from conveyor_engine.text.schema.disjoint import distinguish, find_overlaps
from conveyor_engine.text.schema.keywords import WORDS
from conveyor_engine.text.schema.negate import Base
from conveyor_engine.text.schema.parts import Node, Parts, merge_branches
from conveyor_engine.text.schema.problems import SchemaError

if TYPE_CHECKING:
    from conveyor_engine.text.schema.rewrite import Rewriter

_OVERLAPS_MAX: Final = 32  # pairs of branches of a `oneOf`, one of which excludes the other
_CONDITION: Final = frozenset({"if", "then", "else"})


def rewrite(rewriter: "Rewriter", node: Node, parts: Parts) -> None:
    """Rewrite the keywords of choices."""
    schema = node.schema
    if "oneOf" in schema:
        _rewrite_one_of(rewriter, node, parts)
    if "not" in schema:
        excluded = rewriter.negate(schema["not"], node.inside("not"), Base(schema))
        if not excluded.is_exact:
            rewriter.relax("not", node.at)
        rewriter.add(
            parts, rewriter.rewrite(excluded.schema, node.inside("not"), closed=False, merged=True), "not", node.at
        )
    if "if" in schema and ("then" in schema or "else" in schema):
        _rewrite_condition(rewriter, node, parts)
    if (cases := _find_cases(schema)) is not None:
        _rewrite_cases(rewriter, node, parts, cases)


def members(node: Node) -> list[tuple[int, Any]]:
    """Return the schemas of `allOf`, with their numbers, without the conditions that `rewrite` treats together."""
    is_apart = _find_cases(node.schema) is not None
    return [
        (number, each) for number, each in enumerate(node.schema["allOf"]) if not (is_apart and _is_condition(each))
    ]


def _rewrite_one_of(rewriter: "Rewriter", node: Node, parts: Parts) -> None:
    branches = node.schema["oneOf"]
    closed = node.closed and is_choice(node.schema)

    def resolve(reference: str) -> Any:
        try:
            return rewriter.document.resolve(reference, node.at)[0]
        except SchemaError:
            return None

    told = distinguish(branches, resolve) if len(branches) > 1 else branches
    excluded = _exclude(
        rewriter, node, branches, list(find_overlaps(branches, resolve, are_closed=closed)) if told is None else []
    )
    rewritten = []
    for number, branch in enumerate(told or branches):
        inner = rewriter.rewrite(
            branch, node.inside(f"oneOf/{number}"), closed=closed, merged=node.merged or number in excluded
        )
        rewritten.append({"allOf": [inner, *excluded[number]]} if excluded.get(number) else inner)
    choice = {"anyOf": merge_branches(rewritten)}
    if "anyOf" in parts.own:
        parts.more.append(choice)
    else:
        parts.own |= choice


def _exclude(
    rewriter: "Rewriter", node: Node, branches: Sequence[Any], overlaps: Sequence[tuple[int, int]]
) -> dict[int, list[Any]]:
    """Return for each branch the complements of the branches that an answer could fit too."""
    excluded: dict[int, list[Any]] = {}
    if len(overlaps) > _OVERLAPS_MAX:
        rewriter.relax("oneOf", node.at)
        return excluded
    for first, second in overlaps:
        at = node.inside(f"oneOf/{second}")
        first_schema = rewriter.follow(branches[first], node.inside(f"oneOf/{first}"))
        other = rewriter.negate(branches[second], at, Base(node.schema, first_schema))
        if not other.is_exact:
            rewriter.relax("oneOf", node.at)
        excluded.setdefault(first, []).append(rewriter.rewrite(other.schema, at, closed=False, merged=True))
    return excluded


def _rewrite_condition(rewriter: "Rewriter", node: Node, parts: Parts) -> None:
    """Write a condition as a choice: it holds, and `then` too, or it does not, and `else` does."""
    schema = node.schema
    otherwise = rewriter.negate(schema["if"], node.inside("if"), Base(schema, schema.get("else")))
    if not otherwise.is_exact:
        rewriter.relax("if", node.at)
    branches = [
        {"allOf": [schema["if"], schema.get("then", True)]},
        {"allOf": [otherwise.schema, schema.get("else", True)]},
    ]
    choice = {"anyOf": [rewriter.rewrite(each, node.at, closed=False, merged=True) for each in branches]}
    rewriter.add(parts, choice, "if", node.at)


class Case(NamedTuple):
    """A condition on the value of one property."""

    values: list[Any]
    is_required: bool
    then: Any
    otherwise: Any


class Cases(NamedTuple):
    """Conditions on the values of the same property, no two of which hold for one value."""

    name: str
    cases: list[Case]


def _is_condition(schema: Any) -> bool:
    return isinstance(schema, Mapping) and "if" in schema and WORDS & schema.keys() <= _CONDITION


def _find_cases(schema: Mapping[str, Any]) -> Cases | None:
    """Return the conditions in `allOf` if they all test one property of an object. Their number is not limited."""
    if "properties" not in schema and schema.get("type") != "object":
        return None
    found = [each for each in schema.get("allOf", ()) if _is_condition(each)]
    tests = [_read_test(each["if"]) for each in found]
    known = [test for test in tests if test is not None]
    values = [repr(value) for _, some, _ in known for value in some]
    if (
        len(found) < 2
        or len(known) < len(tests)
        or len({name for name, _, _ in known}) > 1
        or len(set(values)) < len(values)
    ):
        return None
    return Cases(
        known[0][0],
        [
            Case(some, is_required, each.get("then", True), each.get("else", True))
            for (_, some, is_required), each in zip(known, found, strict=True)
        ],
    )


def _read_test(condition: Any) -> tuple[str, list[Any], bool] | None:
    """Return the property that a condition tests, its values, and whether the property must be there."""
    match condition:
        case {"properties": dict(properties)} if len(properties) == 1:
            ((name, test),) = properties.items()
            words = WORDS & condition.keys()
            required = condition.get("required", [])
            is_plain = words <= {"properties", "required", "type"} and required in ([], [name])
            if not is_plain or condition.get("type", "object") != "object" or not isinstance(test, Mapping):
                return None
            effects = WORDS & test.keys() - {"type"}
            if effects == {"const"} and isinstance(test["const"], str):
                return name, [test["const"]], bool(required)
            if effects == {"enum"} and all(isinstance(value, str) for value in test["enum"]):
                return name, test["enum"], bool(required)
    return None


def _rewrite_cases(rewriter: "Rewriter", node: Node, parts: Parts, found: Cases) -> None:
    """Write the conditions as a choice: a branch for each case, one for other values, and one without the property."""
    name, cases = found
    branches: list[tuple[Any, list[Any]]] = []
    for case in cases:
        others = [other.otherwise for other in cases if other is not case]
        branches.append(({"required": [name], "properties": {name: {"enum": case.values}}}, [case.then, *others]))
    every = [value for case in cases for value in case.values]
    rest = rewriter.negate({"enum": every}, node.at).schema
    branches.append(({"required": [name], "properties": {name: rest}}, [case.otherwise for case in cases]))
    absent = [case.otherwise if case.is_required else case.then for case in cases]
    branches.append(({"properties": {name: False}}, absent))
    choice = {
        "anyOf": [
            rewriter.rewrite(
                {"type": "object", **test, "allOf": [each for each in more if each is not True]},
                node.at,
                closed=False,
                merged=True,
            )
            for test, more in branches
        ]
    }
    parts.more.append(choice)
