"""Tests the channels of gpt-oss on a real server with a random model, whose tokenizer has the marks.

The marks that end messages are made likely.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from openai import OpenAI
from tests.engine.chat_model import write_chat_model
from tests.engine.processes import EngineServer
from tokenizers import AddedToken, Tokenizer

MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|call|>", "<|return|>")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}}, "required": ["a"],
          "additionalProperties": False}  # fmt: skip
FORM = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("f", "g")]
TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}<|channel|>final<|message|>{{ message.thinking }}"
    "{{ message.content }}{% if not loop.last or add_generation_prompt %}<|end|>{% endif %}{% endfor %}"
    "{# <|channel|>analysis<|message|> #}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
MESSAGES = [{"role": "user", "content": "a"}]


class Server(EngineServer):
    """The server, and the ids of the marks."""

    ids: dict[str, int]

    @property
    def bias(self) -> dict[str, int]:
        return {str(self.ids[mark]): 8 for mark in ("<|end|>", "<|return|>", "<|call|>")}

    def chat(self, path: str = "/v1/chat/completions", **fields: Any) -> Any:
        body = {"messages": MESSAGES, "max_tokens": 700, "temperature": 1, "logit_bias": self.bias, **fields}
        response = self.post(path, {key: value for key, value in body.items() if value is not None})
        assert response.status_code == 200, response.text
        return response.json()


@pytest.fixture(scope="module")
def channels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("channels")
    model = write_chat_model(folder / "tiny")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    tokenizer.save(str(model / "tokenizer.json"))
    ids = {mark: tokenizer.token_to_id(mark) for mark in (*MARKS, "<|end|>")}
    for name in ("config.json", "generation_config.json"):
        written = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps({**written, "eos_token_id": [ids["<|return|>"], ids["<|call|>"]]}))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    with Server(folder, model, max_num_seqs=2) as started:
        started.ids = ids
        yield started.wait_ready()


@pytest.mark.parametrize("parallel", [True, False])
def test_a_required_call_is_written_in_its_channel(channels: Server, parallel: bool) -> None:
    for seed in range(4):
        (choice,) = channels.chat(tools=TOOLS, tool_choice="required", parallel_tool_calls=parallel, seed=seed)[
            "choices"
        ]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] in ("f", "g")
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)


def test_an_input_in_its_channel_follows_a_grammar_in_lark(channels: Server) -> None:
    syntax = {"syntax": "lark", "definition": 'start: "{\\"input\\": " A "}"\nA: /[0-9]{1,3}/'}
    custom = {"name": "h", "format": {"type": "grammar", "grammar": syntax}}
    choice = {"type": "custom", "custom": {"name": "h"}}
    tools = [*TOOLS, {"type": "custom", "custom": custom}]
    for seed in range(3):
        message = channels.chat(tools=tools, tool_choice=choice, seed=seed)["choices"][0]["message"]
        (call,) = message["tool_calls"]
        assert (call["type"], call["custom"]["name"]) == ("custom", "h")
        assert re.fullmatch(r'\{"input": \d{1,3}\}', call["custom"]["input"])


def test_text_follows_a_schema_after_the_thinking(channels: Server) -> None:
    for seed in range(4):
        (choice,) = channels.chat(response_format=FORM, seed=seed)["choices"]
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)


def test_text_follows_other_forms(channels: Server) -> None:
    (choice,) = channels.chat(structured_outputs={"regex": "a[bc]{3}"})["choices"]
    assert re.fullmatch("a[bc]{3}", choice["message"]["content"])


def test_beside_tools_an_answer_follows_the_schema_or_is_a_call(channels: Server) -> None:
    kinds = set()
    for seed in range(8):
        (choice,) = channels.chat(tools=TOOLS, response_format=FORM, seed=seed)["choices"]
        message = choice["message"]
        kinds.add("call" if message.get("tool_calls") else "text")
        if not message.get("tool_calls"):
            jsonschema.validate(json.loads(message["content"]), SCHEMA)
    assert kinds == {"call", "text"}


def test_a_stream_reports_the_same(channels: Server) -> None:
    fields: Any = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", "seed": 3, "temperature": 1}
    whole = channels.chat(**fields)["choices"][0]["message"]
    with OpenAI(api_key="none", base_url=channels.url + "/v1") as client:
        chunks: Any = client.chat.completions.create(
            model="tiny", max_tokens=700, stream=True, logit_bias=channels.bias, **fields
        )
        deltas = [chunk.choices[0].delta for chunk in chunks]
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    assert "".join(delta.content or "" for delta in deltas) == ""
    assert "".join(getattr(delta, "reasoning", None) or "" for delta in deltas) == (whole.get("reasoning") or "")
    assert [call.function.name for call in calls if call.id] == [whole["tool_calls"][0]["function"]["name"]]
    arguments = "".join(call.function.arguments or "" for call in calls)
    assert arguments == whole["tool_calls"][0]["function"]["arguments"]


def test_the_responses_api_reports_thinking_and_call_as_items(channels: Server) -> None:
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    fields = {"messages": None, "max_tokens": None, "input": "a", "max_output_tokens": 700, "tools": tools}
    kinds = set()
    for seed in range(6):
        answer = channels.chat("/v1/responses", **fields, tool_choice="required", seed=seed)
        kinds.add(tuple(item["type"] for item in answer["output"]))
    assert kinds == {("function_call",), ("reasoning", "function_call")}


def test_the_template_gets_earlier_thinking(channels: Server) -> None:
    earlier = {"role": "assistant", "content": "b", "reasoning": "hm"}
    body = {"messages": [*MESSAGES, earlier, *MESSAGES]}
    tokens = channels.post("/tokenize", body).json()["tokens"]
    assert "<|message|>hmb<|end|>" in channels.post("/detokenize", {"tokens": tokens}).json()["prompt"]


def test_an_answer_that_continues_a_message_has_no_channels(channels: Server) -> None:
    fields = {"add_generation_prompt": False, "continue_final_message": True}
    messages = [*MESSAGES, {"role": "assistant", "content": "b"}]
    (choice,) = channels.chat(messages=messages, **fields, structured_outputs={"regex": "a[bc]{3}"})["choices"]
    assert re.fullmatch("a[bc]{3}", choice["message"]["content"])


def test_a_budget_of_thinking_is_refused(channels: Server) -> None:
    response = channels.post("/v1/chat/completions", {"messages": MESSAGES, "thinking_token_budget": 5})
    assert response.status_code == 400
    assert "<|channel|>analysis<|message|> and <|end|> are not single tokens" in response.json()["error"]["message"]
