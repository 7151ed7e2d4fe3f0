"""Tests structural tags: free text in which a trigger begins a part that has a form."""

from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tests.engine.chat_model import VOCABULARY, write_tokenizer
from tests.engine.text.local_grammars import Grammars
from tests.engine.text.test_grammar import END_ID, follows

from conveyor_engine.serving.preparing.structured import build_form_grammar, read_tags
from conveyor_engine.text.tokenizer import Tokenizer

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
COUNT = {"begin": "<count>", "schema": SCHEMA, "end": "</count>"}
CALL = {"begin": "<function=now>", "schema": {"enum": ["utc", "local"]}, "end": "</function>"}
OLD = {"structures": [COUNT, CALL], "triggers": ["<count", "<function="]}
GOOD = (
    "", "free text", "<count>{\"n\": 5}</count>", "a <count>{\"n\": 5}</count> b <function=now>\"utc\"</function> c",
)  # fmt: skip
BAD = (
    "<count>5</count>", "<count>{\"n\": 5}", "<count>{\"m\": 5}</count>", "a <function=now>\"here\"</function>",
    "<function=then>\"utc\"</function>",
)  # fmt: skip


def new(*tags: Any, **more: Any) -> dict[str, Any]:
    return {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<n"], "tags": [*tags], **more}}


NUMBER = {"type": "tag", "begin": "<n>", "content": {"type": "regex", "pattern": "[0-9]/[0-9]"}, "end": "</n>"}


class Model:
    """A tokenizer, which may have marks as tokens, and its grammars."""

    def __init__(self, folder: Path, *marks: str) -> None:
        write_tokenizer(folder)
        trained = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        trained.add_tokens([tokenizers.AddedToken(mark, special=False, normalized=False) for mark in marks])
        trained.save(str(folder / "tokenizer.json"))
        self._tokenizer, self._grammars = Tokenizer(folder), Grammars(folder, VOCABULARY, [END_ID, 1])

    def follows(self, value: Any, text: str) -> bool:
        grammar = build_form_grammar(read_tags(value), "form", self._tokenizer.find_id)
        return follows(self._grammars, self._tokenizer, grammar.text, text)


@pytest.fixture(scope="module", params=[(), ("<count>", "</count>", "</function>")], ids=["text", "tokens"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("tags"), *request.param)


def test_a_trigger_begins_a_part_of_the_form(model: Model) -> None:
    value = OLD | {"triggers": ["<count>", "<function="]}
    assert [text for text in GOOD if not model.follows(value, text)] == []
    assert [text for text in BAD if model.follows(value, text)] == []


def test_the_newer_form_can_demand_a_tag_and_end_with_it(tmp_path: Path) -> None:
    model, tag = Model(tmp_path), "<n>1/2</n>"
    cases = {
        (False, False): ["", "x", f"x{tag}x{tag}x"],
        (True, False): [f"x{tag}x{tag}x"],
        (False, True): ["", "x", f"x{tag}"],
        (True, True): [f"x{tag}"],
    }
    texts = ["", "x", f"x{tag}", f"x{tag}x{tag}x"]
    for (demanded, ends), good in cases.items():
        value = new(NUMBER, at_least_one=demanded, stop_after_first=ends)
        allowed = [text for text in texts if model.follows(value, text)]
        assert set(good) <= set(allowed), (demanded, ends)
        assert (("" in allowed), (f"x{tag}x{tag}x" in allowed)) == (not demanded, not ends)
    assert not model.follows(new(NUMBER), "x<n>1-2</n>")
