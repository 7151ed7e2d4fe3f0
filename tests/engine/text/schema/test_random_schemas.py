"""Random schemas: whatever tokens a model chooses, an answer that ends is valid by its schema."""

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tests.engine.chat_model import VOCABULARY, write_tokenizer
from tests.engine.text.local_grammars import Grammars, answer_by_chance

from conveyor_engine.text.grammar import build_grammar
from conveyor_engine.text.tokenizer import Tokenizer

END_ID = 0
SCHEMAS = 1_000
TOKENS_MAX = 600
_WORDS = ("a", "name", "size", "ü", "x-y", "list of", "ref")
_SCALARS = ("string", "integer", "number", "boolean", "null")


class Maker:
    """Schemas with the keywords of draft 2020-12 that describe one value, an object or a list, and references."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def make(self) -> dict[str, Any]:
        """One, perhaps with definitions."""
        schema = self._value(depth=3)
        if self._random.random() < 0.3:
            schema = {"$defs": {"it": self._value(depth=1)}, "type": "object", "required": ["ref"],
                      "properties": {"ref": {"$ref": "#/$defs/it"}}, "additionalProperties": False}  # fmt: skip
        return schema

    def _value(self, depth: int) -> dict[str, Any]:
        kinds = [self._scalar, self._choice, *([self._object, self._array, self._any_of] if depth else [])]
        return self._random.choice(kinds)(depth)

    def _scalar(self, _: int) -> dict[str, Any]:
        kind = self._random.choice(_SCALARS)
        low = self._random.randint(-20, 20)
        more: dict[str, Any] = {}
        if kind == "string":
            more = self._random.choice(
                [{}, {"minLength": 1, "maxLength": self._random.randint(1, 9)}, {"pattern": "^[a-c]{2,4}x?$"},
                 {"format": self._random.choice(["date", "time", "uuid", "ipv4"])}]
            )  # fmt: skip
        elif kind == "integer":
            more = self._random.choice([{}, {"minimum": low, "maximum": low + self._random.randint(0, 200)}])
        elif kind == "number":
            more = self._random.choice([{}, {"minimum": low, "exclusiveMaximum": low + 3}])
        return {"type": kind, **more}

    def _choice(self, _: int) -> dict[str, Any]:
        values: list[Any] = ["yes", 'no "x" \\', 5, -1.5, None, True, {"a": 1}, [1, "b"]]
        some = self._random.sample(values, self._random.randint(1, 4))
        return {"enum": some} if self._random.random() < 0.7 else {"const": some[0]}

    def _object(self, depth: int) -> dict[str, Any]:
        names = self._random.sample(_WORDS, self._random.randint(0, 4))
        required = [name for name in names if self._random.random() < 0.6]
        others = self._random.choice([False, None, {"type": "integer"}])
        properties = {name: self._value(depth - 1) for name in names}
        closed = {} if others is None else {"additionalProperties": others}
        return {"type": "object", "properties": properties, "required": required, **closed}

    def _array(self, depth: int) -> dict[str, Any]:
        low = self._random.randint(0, 2)
        if self._random.random() < 0.3:
            items = [self._value(depth - 1) for _ in range(low + 1)]
            return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
        bounds = {"minItems": low, "maxItems": low + self._random.randint(0, 3)}
        return {"type": "array", "items": self._value(depth - 1), **bounds}

    def _any_of(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self._value(depth - 1) for _ in range(self._random.randint(2, 3))]}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("schemas")
    write_tokenizer(folder)
    return folder


def test_whatever_is_chosen_is_valid_by_the_schema(directory: Path) -> None:
    grammars, tokenizer = Grammars(directory, VOCABULARY, [END_ID]), Tokenizer(directory)
    num_open = 0
    for seed in range(SCHEMAS):
        schema = Maker(seed).make()
        tokens = answer_by_chance(
            grammars, build_grammar("json", schema, "schema").text, random.Random(seed), END_ID, VOCABULARY, TOKENS_MAX
        )
        if tokens is None:
            num_open += 1
            continue
        value = json.loads(tokenizer.decode(tokens))
        jsonschema.validate(value, schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    assert num_open <= SCHEMAS // 10, "most answers end"
