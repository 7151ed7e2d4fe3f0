"""Tests patterns: each is translated into the library's syntax, and names what it cannot express."""

import re

import jsonschema
import pytest
from tests.engine.chat_model import write_tokenizer
from tests.engine.text.schema.samples import Sampler

from conveyor_engine.text.schema.formats import FORMATS, PATTERNS
from conveyor_engine.text.schema.strings import read_pattern, without

# A pattern, texts that match it, and texts that do not.
EXACT: dict[str, tuple[list[str], list[str]]] = {
    r"^[\w-.]+$": (["a-b.c"], ["a b"]),  # ECMAScript only
    r"^\u0061\x62\u{63}\cJ$": (["abc\n"], ["abc"]),
    r"^\ud83d\ude00$": (["😀"], ["a"]),
    r"^a\/b\-c\@$": (["a/b-c@"], [r"a\/b"]),
    r"^(?<year>[0-9]{2}){2}$": (["2026"], ["202"]),
    r"^{a}{2}$": (["{a}}"], ["aa"]),
    r'^[^"]$': (["a", "\\"], ['"']),
    r"^[^\\]$": (['"'], ["\\"]),
    r'^(?:[^"\\]|\\")$': (['\\"', "a"], ['"', "\\"]),
    r"^[^]$": (["\n"], ["ab"]),
    r"^[[a&&b]+$": (["[&b"], ["c"]),
    r"^.$": (["a"], ["\n", "\r", "\u2028"]),
    r"^\d\w$": (["1a"], ["१a", "1é"]),
    r"\Aab\Z": (["ab"], ["abc"]),
    r"b": (["abc"], ["ac"]),
    r"^a|b$": (["ax", "xb"], ["xax"]),
    r"^(?=.*\d)(?=.*[a-c]).{2,3}$": (["a1", "1xa"], ["11", "ab", "abc1"]),
    r"^(?![xy])[a-z]+$": (["ax"], ["xa"]),
    r"^(?!^[xy]*$)[a-z]*$": (["xa"], ["xy", ""]),
}
LOOSE = {r"^(?!foo)[a-z]+$": "^[a-z]+$", r"a(?=b)c": "ac", r"\bfoo\b": "foo", r"(a)\1": "(a)(?s:.*)", r"(?<!x)y": "y"}


@pytest.fixture(scope="module")
def sampler(tmp_path_factory: pytest.TempPathFactory) -> Sampler:
    folder = tmp_path_factory.mktemp("strings")
    write_tokenizer(folder)
    return Sampler(folder)


@pytest.mark.parametrize("pattern", EXACT)
def test_a_pattern_means_the_same_to_the_library(sampler: Sampler, pattern: str) -> None:
    good, bad = EXACT[pattern]
    schema = {"type": "string", "pattern": pattern}
    assert read_pattern(pattern).is_exact
    assert sampler.may(schema, [sampler.quote(text) for text in good + bad]) == [True] * len(good) + [False] * len(bad)


@pytest.mark.parametrize("pattern", LOOSE)
def test_what_the_library_lacks_is_left_out(pattern: str) -> None:
    read = read_pattern(pattern)
    assert (read.expressions, read.is_exact) == ((LOOSE[pattern],), False)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_texts_of_a_known_pattern_match_it(sampler: Sampler, pattern: str) -> None:
    texts = sampler.sample({"type": "string", "pattern": pattern}, 20, 500)
    assert texts
    assert all(re.search(pattern, text) for text in texts)


# jsonschema takes no relative pointer without a "#"
@pytest.mark.parametrize("name", sorted(FORMATS.keys() - {"relative-json-pointer"}))
def test_texts_of_a_format_are_valid(sampler: Sampler, name: str) -> None:
    schema = {"type": "string", "format": name, "maxLength": 60}
    texts = sampler.sample(schema, 10, 80)
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    assert texts
    assert all(name not in checker.checkers or checker.conforms(text, name) for text in texts)


def test_leap_days_are_those_of_leap_years(sampler: Sampler) -> None:
    years = {"2024": True, "2000": True, "2023": False, "1900": False, "0000": False, "0004": True}
    texts = [f'"{year}-02-29"' for year in years]
    assert sampler.may({"type": "string", "format": "date"}, texts) == list(years.values())


def test_a_text_may_be_any_but_some(sampler: Sampler) -> None:
    some, others = ["", "a", "ab", 'é"'], ["b", "abc", "aa", "é", "\n"]
    assert sampler.may({"type": "string", "not": {"enum": some}}, [sampler.quote(text) for text in some + others]) == [
        False
    ] * len(some) + [True] * len(others)
    assert without([]) == "^(?:|(?s:.)+)$"
