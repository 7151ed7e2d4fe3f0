"""`python -m conveyor_bench schemas FOLDER...`: which JSON schemas of files are followed, and validity of answers.

A file has one schema, or a list of cases of the JSON Schema Test Suite, each with a schema and instances of it. For
each schema that is followed, a model of random logits answers at temperature 1, and jsonschema validates the answers.
xgrammar is measured too if it is installed. The last line printed is one JSON object.
"""

import argparse
import importlib
import json
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import jsonschema
import numpy as np
from llguidance import LLMatcher, LLTokenizer
from tests.engine.chat_model import VOCABULARY, write_tokenizer

from conveyor_engine.errors import InvalidRequest
from conveyor_engine.text.grammar import build_grammar, compile_grammar
from conveyor_engine.text.schema.keywords import WORDS, children

_END_ID = 0
_TOKENS_MAX = 1200
_SECONDS_MAX = 60  # for one schema with its samples
_BIASES = (1.0, -1.0, 0.0)  # of quotation marks and closing brackets, so that some answers are short and some long
# The keywords of OpenAI's structured outputs, as published in its guide.
_OPENAI = frozenset({
    "type", "enum", "const", "anyOf", "$ref", "$defs", "definitions", "properties", "required", "additionalProperties",
    "items", "pattern", "format", "multipleOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
    "minItems", "maxItems",
})  # fmt: skip


class Case(NamedTuple):
    """A schema, and instances with their validity."""

    name: str
    schema: Any
    tests: Sequence[Any]


class TooSlow(Exception):
    """The samples of a schema took too long."""


def read_cases(folders: Sequence[Path], most: int) -> Iterator[Case]:
    """Yield the schemas of all JSON files, at most `most` files of each folder, chosen at random (seed 0)."""
    for folder in folders:
        paths = sorted(folder.rglob("*.json"))
        for path in Random(0).sample(paths, min(most, len(paths))):
            whole = json.loads(path.read_text())
            if isinstance(whole, list):
                yield from (Case(f"{path.stem}#{n}", each["schema"], each["tests"]) for n, each in enumerate(whole))
            else:
                yield Case(f"{folder.name}/{path.stem}", whole, ())


class Judge:
    """Judges schemas with one tokenizer."""

    def __init__(self, folder: Path) -> None:
        write_tokenizer(folder)
        self._tokenizer = LLTokenizer(str(folder / "tokenizer.json"), VOCABULARY, [_END_ID])
        texts = [self._tokenizer.decode_bytes([token]) for token in range(VOCABULARY)]
        self._closing = [token for token, text in enumerate(texts) if text in (b'"', b"}", b"]")]
        self._spaces = [token for token, text in enumerate(texts) if text[:1] in (b" ", b"\n", b"\t", b"\r")]

    def judge(self, case: Case, samples: int) -> Counter[str]:
        """Return what happened to the schema, its samples and its instances."""
        try:
            built = build_grammar("json", case.schema, "it")
        except InvalidRequest:
            return Counter(["refused"])
        kind = "relaxed" if built.relaxed else "followed"
        found = Counter([kind])
        compiled = compile_grammar(self._tokenizer, built.text)
        validator = _validator_of(case.schema)
        for seed in range(samples):
            text = self._sample(compiled.deep_copy(), seed)
            verdict = "unfinished" if text is None else "valid" if _is_valid(validator, text) else "invalid"
            found[f"{kind}: {verdict}"] += 1
        for test in case.tests:
            may = self._follows(compiled.deep_copy(), json.dumps(test["data"], ensure_ascii=False))
            found[
                f"{kind}: {'valid' if test['valid'] else 'invalid'} instance {'allowed' if may else 'not allowed'}"
            ] += 1
        return found

    def _sample(self, answer: LLMatcher, seed: int) -> bytes | None:
        """Return a random answer; None if it has not ended."""
        random, text = np.random.default_rng(seed), b""
        for number in range(_TOKENS_MAX):
            if answer.is_stopped():
                return text
            bits = np.unpackbits(np.frombuffer(answer.compute_bitmask(), np.uint8), bitorder="little")[:VOCABULARY]
            logits = random.standard_normal(VOCABULARY)
            logits[self._closing] += _BIASES[seed % len(_BIASES)] + number / 40
            logits[self._spaces] -= 3
            logits[bits == 0] = -np.inf
            token = int(np.argmax(logits + random.gumbel(size=VOCABULARY)))
            if token == _END_ID:
                return text
            answer.consume_token(token)
            text += self._tokenizer.decode_bytes([token])
        return None

    def _follows(self, answer: LLMatcher, text: str) -> bool:
        return all(map(answer.consume_token, self._tokenizer.tokenize_str(text))) and answer.is_accepting()


def _validator_of(schema: Any) -> jsonschema.protocols.Validator | None:
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except Exception:
        return None
    return kind(schema, format_checker=kind.FORMAT_CHECKER)


def _is_valid(validator: jsonschema.protocols.Validator | None, text: bytes) -> bool:
    value = json.loads(text)
    try:
        return validator is None or validator.is_valid(value)
    except Exception:  # of the validator: a pattern that Python cannot read, for example
        return True


def judge_peers(schema: Any) -> Counter[str]:
    """Return which other programs accept the schema."""
    found = Counter[str]()
    if isinstance(schema, dict) and not LLMatcher.validate_grammar(
        LLMatcher.grammar_from_json_schema(json.dumps(schema))
    ):
        found["llguidance"] += 1
    try:
        importlib.import_module("xgrammar").Grammar.from_json_schema(json.dumps(schema))
        found["xgrammar"] += 1
    except Exception:  # not installed, or the schema is refused
        pass
    found["openai"] += set(_words(schema)) <= _OPENAI
    return found


def _words(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        yield from WORDS & schema.keys()
        for _, each in children(schema):
            yield from _words(each)


def _raise_too_slow(*_: object) -> None:
    raise TooSlow


def main(arguments: Sequence[str]) -> None:
    """Judge all schemas, and print the counts for each folder, and the cases that are not followed."""
    parser = argparse.ArgumentParser(prog="python -m conveyor_bench schemas", description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--most", type=int, default=10**6, help="files of each folder")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGALRM, _raise_too_slow)
    totals: dict[str, dict[str, int]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        judge = Judge(Path(temporary))
        for folder in options.folders:
            found = Counter[str]()
            for case in read_cases([folder], options.most):
                signal.alarm(_SECONDS_MAX)
                try:
                    judged = judge.judge(case, options.samples)
                except TooSlow:
                    judged = Counter(["too slow to sample"])
                signal.alarm(0)
                found += judged + judge_peers(case.schema) + Counter(["schemas"])
                notable = {"refused", "too slow to sample", "followed: invalid", "followed: invalid instance allowed"}
                if wrong := sorted(notable & judged.keys()):
                    print(f"{case.name}: {', '.join(wrong)}")
            totals[folder.name] = dict(sorted(found.items()))
            print(folder.name, totals[folder.name], flush=True)
    print(json.dumps(totals))
