"""Tests that the scripted model writes what is written down for it, step by step."""

import json
from pathlib import Path
from typing import Any

import pytest

from conveyor_engine.text.parsing.build import Parsing, build_parser
from e2e.demo_model.script import SCRIPTS, find_last, train


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("scripted")
    train(made, lambda _: None)
    return made


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_agent_with_the_script_s_tools_gets_its_calls_in_turn(folder: Path, script: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tools = [{"type": "function", "function": {"name": name}} for name, _ in SCRIPTS[script]]
    messages: list[Any] = [{"role": "user", "content": "Correct it."}]
    answers = []
    for _ in range(len(SCRIPTS[script]) + 1):
        prompt = tokenizer.apply_chat_template(messages, tools=tools, return_tensors="pt", return_dict=True)
        (answer,) = model.generate(**prompt, max_new_tokens=100, do_sample=False)
        text = tokenizer.decode(answer[prompt["input_ids"].shape[1] :], skip_special_tokens=True)
        parser = build_parser(Parsing(tool_format="hermes"))
        parts = [*parser.feed(text), *parser.finish()]
        answers.append(
            {name: "".join(t for n, t in parts if n == name) for name in ("content", "tool_call", "arguments")}
        )
        messages.append({"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]})
    *calls, last = answers
    assert [(each["tool_call"], json.loads(each["arguments"])) for each in calls] == list(SCRIPTS[script])
    assert last == {"content": find_last(script), "tool_call": "", "arguments": ""}
