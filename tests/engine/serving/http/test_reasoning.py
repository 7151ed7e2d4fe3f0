"""Tests thinking before the answer, on a real server with a random model.

The mark that ends thinking is made likely.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from openai import OpenAI
from tests.engine.chat_model import write_chat_model
from tests.engine.processes import EngineServer
from tokenizers import AddedToken, Tokenizer

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}}, "required": ["a"],
          "additionalProperties": False}  # fmt: skip
FORM = {"response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
TEMPLATE = (
    "{% for message in messages %}{{ message.reasoning_content }}{{ message.content.split('</think>')[-1] }}"
    "{% endfor %}{{ reasoning_effort }}<|assistant|>"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% elif enable_thinking %}<think>\n{% endif %}"
)
MESSAGES = [{"role": "user", "content": "a"}]


class Thinker(EngineServer):
    """The server, and the tokens of its model's marks."""

    begin = end = 0

    def chat(self, **fields: Any) -> Any:
        """Send a request. The thinking has about thirty tokens, because the model is random."""
        bias = {"logit_bias": {str(self.end): 4}}
        body = {"messages": MESSAGES, "max_tokens": 900, "temperature": 1, **bias, **fields}
        response = self.post("/v1/chat/completions", body)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Thinker]:
    folder = tmp_path_factory.mktemp("thinker")
    model: Path = write_chat_model(folder / "tiny")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in ("<think>", "</think>")])
    tokenizer.save(str(model / "tokenizer.json"))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    with Thinker(folder, model, max_num_seqs=2) as started:
        started.begin, started.end = tokenizer.token_to_id("<think>"), tokenizer.token_to_id("</think>")
        started.wait_ready()
        yield started


def thinking(value: bool) -> dict[str, Any]:
    return {"chat_template_kwargs": {"enable_thinking": value}}


def test_thinking_is_separated_from_the_answer(thinker: Thinker) -> None:
    message = thinker.chat(seed=2, ignore_eos=True, **thinking(True))["message"]
    assert message["reasoning"]
    assert message["reasoning"] == message["reasoning_content"]
    assert "</think>" not in message["reasoning"]
    without = thinker.chat(seed=1, max_tokens=30, **thinking(False))["message"]
    assert "reasoning" not in without


@pytest.mark.parametrize("fields", [FORM, {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}])
def test_a_grammar_begins_behind_the_thinking(thinker: Thinker, fields: dict[str, Any]) -> None:
    nums_characters = []
    for seed in range(4):
        choice = thinker.chat(seed=seed, **fields, **thinking(True))
        message = choice["message"]
        nums_characters.append(len(message.get("reasoning", "")))
        assert choice["finish_reason"] == ("tool_calls" if "tools" in fields else "stop")
        text = message["tool_calls"][0]["function"]["arguments"] if "tools" in fields else message["content"]
        jsonschema.validate(json.loads(text), SCHEMA)
    assert max(nums_characters) > 5, "what is no JSON, and came before it"


@pytest.mark.parametrize("fields", [{}, FORM])
@pytest.mark.parametrize("budget", [0, 5])
def test_thinking_has_no_more_tokens_than_its_budget(thinker: Thinker, fields: dict[str, Any], budget: int) -> None:
    never = {"logit_bias": {str(thinker.end): -100}}  # but for the budget it would not end
    body = {**fields, **never, "thinking_token_budget": budget, "return_token_ids": True, "max_tokens": 60}
    choice = thinker.chat(seed=3, ignore_eos=not fields, **body, **thinking(True))
    assert choice["token_ids"].index(thinker.end) == budget
    if fields:
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)


def test_thinking_can_be_left_out_of_the_answer(thinker: Thinker) -> None:
    fields: dict[str, Any] = {"seed": 4, **FORM, **thinking(True)}
    whole = thinker.chat(**fields)["message"]
    without = thinker.chat(include_reasoning=False, **fields)["message"]
    assert without == {name: text for name, text in whole.items() if not name.startswith("reasoning")}
    bias = {"logit_bias": {str(thinker.end): 4}}
    body = {"messages": MESSAGES, "max_tokens": 900, "temperature": 1, "stream": True, **bias, **fields}
    body |= {"include_reasoning": False, "stream_options": {"include_usage": True}}
    events = thinker.post("/v1/chat/completions", body).text.split("\n\n")[:-2]
    chunks = [json.loads(each.removeprefix("data: ")) for each in events]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == whole["content"]
    assert not any(delta.get(name) for delta in deltas for name in ("reasoning", "reasoning_content"))
    assert chunks[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] > 5, "what is left out counts"


def test_a_budget_of_a_model_that_does_not_think_is_refused(server: EngineServer) -> None:
    error = server.post("/v1/chat/completions", {"messages": MESSAGES, "thinking_token_budget": 5}).json()["error"]
    assert (error["code"], error["param"]) == ("invalid_value", "thinking_token_budget")


def test_a_model_may_think_or_not_before_a_grammar(thinker: Thinker) -> None:
    """The prompt does not decide it, so only the answer's first token may begin the thinking."""
    seen = set()
    for begin, end in ((100, 100), (-100, 0)):
        for seed in range(6):
            bias = {str(thinker.begin): begin, str(thinker.end): end}
            message = thinker.chat(seed=seed, **FORM, logit_bias=bias)["message"]
            jsonschema.validate(json.loads(message["content"]), SCHEMA)
            seen.add((begin, "reasoning" in message))
    assert {(100, True), (-100, False)} <= seen
    assert (-100, True) not in seen


def test_without_thinking_a_grammar_holds_at_once(thinker: Thinker) -> None:
    message = thinker.chat(seed=3, **FORM, **thinking(False))["message"]
    assert "reasoning" not in message
    jsonschema.validate(json.loads(message["content"]), SCHEMA)


def test_a_stream_reports_the_same(thinker: Thinker) -> None:
    fields: dict[str, Any] = {"seed": 4, **FORM, **thinking(True)}
    whole = thinker.chat(**fields)["message"]
    with OpenAI(base_url=thinker.url + "/v1", api_key="none", max_retries=0) as client:
        stream: Any = client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=900, temperature=1, stream=True,  # type: ignore[arg-type]
            extra_body={"logit_bias": {str(thinker.end): 4}, **fields},
        )  # fmt: skip
        deltas = [chunk.choices[0].delta for chunk in stream]
    for name in ("reasoning", "reasoning_content", "content"):
        assert "".join(getattr(delta, name, None) or "" for delta in deltas) == whole[name]


def test_effort_and_earlier_thinking_reach_the_template(thinker: Thinker) -> None:
    def count(messages: Any = MESSAGES, **fields: Any) -> int:
        body = {"messages": messages, "max_tokens": 1, **fields}
        num: int = thinker.post("/v1/chat/completions", body).json()["usage"]["prompt_tokens"]
        return num

    bare = count()
    assert count(reasoning_effort="low") > bare
    assert count(reasoning_effort="none") > count(reasoning_effort="low") + 2, "it turns thinking off"
    for name in ("reasoning", "reasoning_content"):
        earlier = [{"role": "assistant", "content": "a", name: "bzbz"}]
        assert count(messages=earlier) > bare
    refused = thinker.post("/v1/chat/completions", {"messages": MESSAGES, "reasoning_effort": "much"})
    assert refused.json()["error"]["param"] == "reasoning_effort"
