"""The schemas that libraries write for their types: which the engine follows, and that random answers are valid.

The folder `emitted` has the schemas of libraries of other languages, and the programs that wrote them.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.engine.chat_model import write_tokenizer
from tests.engine.text.schema.python_types import msgspec_schemas, pydantic_schemas
from tests.engine.text.schema.samples import Sampler

from conveyor_engine.text.json_grammar import read_schema

FOLDER = Path(__file__).parent / "emitted"
SCHEMAS: dict[str, dict[str, Any]] = {
    "pydantic": pydantic_schemas(),
    "msgspec": msgspec_schemas(),
    **{name: json.loads((FOLDER / f"{name}.json").read_text()) for name in ("zod", "typebox", "go", "java")},
}
# The types with a keyword that is relaxed. All others are followed.
RELAXED = {
    "pydantic": {"set[int]": "uniqueItems", "frozenset[str]": "uniqueItems"},
    "msgspec": {"set[int]": "uniqueItems", "frozenset[str]": "uniqueItems"},
    "zod": {},
    "typebox": {"Array, uniqueItems": "uniqueItems"},
    "go": {"uniqueItems": "uniqueItems"},
    "java": {},
}
SEEDS = 2
# Random texts are no regular expressions, random numbers may be infinite for Python, and `re` has no `\\p`.
UNCHECKED = {"Pattern", "z.emoji()", "z.float32()", "z.float64()"}
PAGE = Path(__file__).parents[4] / "docs" / "schemas.md"


@pytest.fixture(scope="module")
def sampler(tmp_path_factory: pytest.TempPathFactory) -> Sampler:
    folder = tmp_path_factory.mktemp("emitted")
    write_tokenizer(folder)
    return Sampler(folder)


@pytest.mark.parametrize("library", SCHEMAS)
def test_the_types_of_a_library_are_followed(library: str) -> None:
    relaxed = {name: read_schema(schema).relaxed for name, schema in SCHEMAS[library].items()}
    assert {name: each[0].keyword for name, each in relaxed.items() if each} == RELAXED[library]


@pytest.mark.parametrize("library", SCHEMAS)
def test_answers_to_the_types_of_a_library_are_valid(sampler: Sampler, library: str) -> None:
    checked = [schema for name, schema in SCHEMAS[library].items() if name not in UNCHECKED]
    ended = [schema for schema in checked if sampler.count_valid(schema, SEEDS, tokens_max=300)]
    assert len(ended) >= 0.9 * len(checked)


def test_the_page_has_the_counts() -> None:
    rows = dict(line.strip("| ").split(" | ", 1) for line in PAGE.read_text().splitlines() if line.startswith("| "))
    for library, schemas in SCHEMAS.items():
        name = {
            "pydantic": "pydantic",
            "msgspec": "msgspec",
            "zod": "Zod",
            "typebox": "TypeBox",
            "go": "Go",
            "java": "Java",
        }
        row = next(value for key, value in rows.items() if key.startswith(name[library]))
        followed = len(schemas) - len(RELAXED[library])
        assert row.split(" | ")[1:3] == [str(len(schemas)), str(followed)], library
