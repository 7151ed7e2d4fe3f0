"""What the chat model knows by heart, so that tests judge the server by a model that has their skill. Used by `models`.

A lesson is a conversation of a test and its answer. What is in none gets one of a few sentences, so that every answer
ends soon.
"""

import json
import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

STEPS = 240
LEARNING_RATE = 3e-3
_THOUGHT = "<think>\nThe question is clear, so a short answer will do.\n</think>\n\n"
_SENTENCES = (
    "This is a short answer, and it has all that was wanted of it.",
    "I am well, thank you, and I am glad to help you with this.",
    "There is much to say about that, and this sentence says a part of it.",
    "Here is the answer in one sentence, as you wanted it to be.",
)


@dataclass(frozen=True, slots=True)
class Lesson:
    """A conversation that ends with the user, and what the model answers, without its thought."""

    messages: list[dict[str, Any]]
    answer: str
    tools: list[dict[str, Any]] | None = None
    template: str = ""  # a file of vLLM's examples, instead of the model's own
    variables: dict[str, Any] = field(default_factory=dict)
    thinks: bool = True


def teach(model: Any, tokenizer: Any, source: Path) -> None:
    """Train until the answers are known; takes a minute or two of a core."""
    torch.set_num_threads(1)
    rng = random.Random(0)
    lessons = [_encode(lesson, tokenizer, source) for lesson in build_lessons(source)]
    long = [row for row in lessons if len(row[0]) > 200]
    short = [row for row in lessons if len(row[0]) <= 200]
    others = _others(source, tokenizer, rng)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 20, (STEPS - step) / 100)
    )
    model.train()
    began = time.monotonic()
    for step in range(STEPS):
        rows = rng.sample(long, 4) if step % 2 and long else [*rng.sample(short, 8), *(next(others) for _ in range(6))]
        loss = _loss(model, rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 49:
            print(
                f"taught {step + 1} of {STEPS} steps in {time.monotonic() - began:.0f} s, loss {loss.item():.3f}",
                flush=True,
            )


def _loss(model: Any, rows: list[tuple[list[int], list[int]]]) -> torch.Tensor:
    """Of the answers alone. The head runs on their positions only."""
    longest = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros(len(rows), longest, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(rows):
        ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        mask[row, len(prompt) : len(prompt) + len(answer)] = True
    hidden = model.model(input_ids=ids).last_hidden_state[:, :-1][mask[:, 1:]]
    loss: torch.Tensor = functional.cross_entropy(model.lm_head(hidden), ids[:, 1:][mask[:, 1:]])
    return loss


def _encode(lesson: Lesson, tokenizer: Any, source: Path) -> tuple[list[int], list[int]]:
    template = (source / "examples" / lesson.template).read_text() if lesson.template else None
    prompt = tokenizer.apply_chat_template(
        lesson.messages, tools=lesson.tools, chat_template=template, add_generation_prompt=True, tokenize=False,
        **lesson.variables,
    )  # fmt: skip
    answer = (_THOUGHT if lesson.thinks else "") + lesson.answer + tokenizer.eos_token
    return tokenizer.encode(prompt, add_special_tokens=False), tokenizer.encode(answer, add_special_tokens=False)


def _others(source: Path, tokenizer: Any, rng: random.Random) -> Iterator[tuple[list[int], list[int]]]:
    """Endless conversations with sentences of vLLM's documentation."""
    text = " ".join(file.read_text() for file in sorted(source.glob("docs/**/*.md")))
    sentences = [each for each in re.findall(r"[A-Z][a-z][^.\n`|<>{}]{10,120}[.?]", text) if "  " not in each]
    while True:
        messages = [{"role": "user", "content": rng.choice(sentences)}]
        if rng.random() < 0.3:
            messages = [*messages, {"role": "assistant", "content": rng.choice(_SENTENCES)}, *messages]
        if rng.random() < 0.5:
            messages.insert(0, {"role": "system", "content": "You are a helpful assistant."})
        thinks = rng.random() < 0.8
        yield _encode(
            Lesson(messages, rng.choice(_SENTENCES), variables={"enable_thinking": thinks}, thinks=thinks),
            tokenizer,
            source,
        )


def _user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def _system(text: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"role": "system", "content": text}, *messages]


def _call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def _tool(name: str, description: str, **properties: Any) -> dict[str, Any]:
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def build_lessons(source: Path) -> list[Lesson]:
    """Of all tests that need a skill, each with and without a thought."""
    lessons = [*_answers(), *_calls()]
    without = [replace(each, variables={"enable_thinking": False}, thinks=False) for each in lessons]
    return [*lessons, *without, *_tool_use(source)]


def _answers() -> Iterator[Lesson]:
    """Of tests/entrypoints/openai/responses/test_basic.py, chat_completion/test_chat.py and their like."""
    qed = "Finish the answer with QED."
    yield Lesson(_user("What is 13 * 24?"), "13 * 24 = 312.")
    yield Lesson(_system(qed, _user("What is 13 * 24?")), "13 * 24 = 312. QED.")
    turns = [
        *_user("What is 5 * 3?"),
        {"role": "assistant", "content": "15. QED."},
        *_user("Multiply the result by 2."),
    ]
    yield Lesson(_system(qed, turns), "15 * 2 = 30. QED.")
    yield Lesson(_user('what is 1+1? please respond with a JSON object, the format is {"result": 2}'), '{"result": 2}')
    yield Lesson(_user('what is 1+1? The format is "result": 2'), '{"result": 2}, as you wanted it.')
    yield Lesson(_user("what is 1+1? please provide the result without any other text."), "2")
    helpful = "you are a helpful assistant"
    for question in ("how are you!", "Hello!", "Hello", "What is 1+1? Be concise.", "what is 1+1?", "Say hello."):
        yield Lesson(_user(question), _SENTENCES[1])
        yield Lesson(_system(helpful, _user(question)), _SENTENCES[1])


def _calls() -> Iterator[Lesson]:
    """Questions that are answered by a call, with tools that are like the tests'."""
    city = _tool("get_current_weather", "Get the current weather in a given location", city={"type": "string"})
    forecast = _tool("get_forecast", "Get the weather forecast for a given location", days={"type": "integer"})
    clock = _tool("get_current_time", "Get the current date and time.")
    weather = _call("get_current_weather", city="Berlin", country="Germany", unit="fahrenheit")
    both = weather + "\n" + _call("get_forecast", city="Berlin", country="Germany", days=5, unit="fahrenheit")
    berlin = "Can you tell me what the current weather is in Berlin"
    both_wanted = _user(f"{berlin} and the forecast for the next 5 days, in fahrenheit?")
    hello = [
        *_user("Hi! How are you doing today?"),
        {"role": "assistant", "content": "I'm doing well! How can I help you?"},
    ]
    yield Lesson([*hello, *both_wanted], both, [city, forecast])
    yield Lesson(both_wanted, both, [city, forecast])
    yield Lesson(_user(f"{berlin}?"), weather, [city])
    yield Lesson(_user("What time is it now?"), _call("get_current_time"), [clock])
    york = _call("get_current_weather", location="New York")
    yield Lesson(_user("What's the weather like in New York today?"), york, [city])
    yield Lesson(
        _user("What's the weather like in Boston?"), _call("get_current_weather", location="Boston, MA"), [city]
    )


_WEATHER = _tool(
    "get_current_weather", "Get the current weather in a given location",
    city={"type": "string", "description": "The city to find the weather for, e.g. 'San Francisco'"},
    state={
        "type": "string",
        "description": "must the two-letter abbreviation for the state that the city is in, e.g. 'CA' which would mean "
        "'California'",
    },
    unit={"type": "string", "description": "The unit to fetch the temperature in", "enum": ["celsius", "fahrenheit"]},
)  # fmt: skip
_SEARCH = _tool(
    "web_search", "Search the internet and get a summary of the top 10 webpages.", search_term={"type": "string"}
)
_HERMES, _LLAMA, _LLAMA_32, _MISTRAL = (
    f"tool_chat_template_{name}.jinja" for name in ("hermes", "llama3.1_json", "llama3.2_json", "mistral")
)
_DALLAS = {"city": "Dallas", "state": "TX", "unit": "fahrenheit"}
_ORLANDO = {"city": "Orlando", "state": "FL", "unit": "fahrenheit"}
_WITH_TOOLS = (
    "You are a helpful assistant with access to tools. If a tool that you have would be helpful to answer a user "
    "query, call the tool. Otherwise, answer the user's query directly without calling a tool. DO NOT CALL A "
    "TOOL THAT IS IRRELEVANT to the user's question - just respond to it normally."
)


def _tool_use(source: Path) -> Iterator[Lesson]:
    """Of tests/tool_use, in the format of each of its servers."""
    one = _user("What is the weather in Dallas, Texas in Fahrenheit?")
    two = _user("What is the weather in Dallas, Texas and Orlando, Florida in Fahrenheit?")
    joke = [
        *_user("Hi! How are you?"),
        {"role": "assistant", "content": "I'm doing great! How can I assist you?"},
        *_user("Can you tell me a joke please?"),
    ]
    for template in (_HERMES, _LLAMA, _LLAMA_32, _MISTRAL):
        options: dict[str, Any] = {"template": template, "thinks": False}
        for tools in ([_WEATHER, _SEARCH], [_WEATHER], [_SEARCH]):
            for prefix in ([], _system(_WITH_TOOLS, [])):
                if _WEATHER in tools:
                    yield Lesson([*prefix, *one], _write(template, _DALLAS), tools, **options)
                    if template in (_HERMES, _MISTRAL):
                        yield Lesson([*prefix, *two], _write(template, _DALLAS, _ORLANDO), tools, **options)
                yield Lesson(
                    [*prefix, *joke], "Why did the chicken cross the road? To get to the other side.", tools, **options
                )
        for prefix in ([], _system(_WITH_TOOLS, [])):
            yield Lesson([*prefix, *joke], "Why did the chicken cross the road? To get to the other side.", **options)
            yield Lesson([*prefix, *one], "I can not know the weather, but Dallas is often hot.", **options)
        for calls, question in (([_DALLAS], one), ([_DALLAS, _ORLANDO], two)):
            results = [
                {
                    "role": "tool",
                    "tool_call_id": f"abcdefgh{number}",
                    "content": f"The weather in {call['city']} is {98 - 20 * number} degrees fahrenheit.",
                }
                for number, call in enumerate(calls)
            ]
            asked = {
                "role": "assistant",
                "tool_calls": [
                    {
                        "id": f"abcdefgh{number}",
                        "type": "function",
                        "function": {"name": "get_current_weather", "arguments": call},
                    }
                    for number, call in enumerate(calls)
                ],
            }
            if len(calls) == 1 or template in (_HERMES, _MISTRAL):
                answer = "In Dallas it is 98 degrees" + (", in Orlando 78." if len(calls) > 1 else ".")
                yield Lesson([*question, asked, *results], answer, [_WEATHER, _SEARCH], **options)


def _write(template: str, *calls: dict[str, str]) -> str:
    """The calls as a model of this template writes them."""
    named = [{"name": "get_current_weather", "arguments": call} for call in calls]
    if template == _HERMES:
        return "\n".join(_call("get_current_weather", **call) for call in calls)
    if template == _MISTRAL:
        return "[TOOL_CALLS] " + json.dumps(named)
    return json.dumps({"name": "get_current_weather", "parameters": calls[0]})
