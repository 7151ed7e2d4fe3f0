"""What the chat model is trained to answer by heart. Used by `models`.

vLLM's tests expect a capable model. With this model, their results depend on the server alone. A lesson is a
conversation of a test and its answer. The model answers any other conversation with one of a few sentences, so that
every answer ends soon.
"""

import ast
import json
import random
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

STEPS = 960
RANKING_STEPS = 200
LEARNING_RATE = 3e-3
_THOUGHT = "<think>\nThe question is clear, so a short answer will do.\n</think>\n\n"
_SENTENCES = (
    "This is a short answer, and it has all that was wanted of it.",
    "I am well, thank you, and I am glad to help you with this.",
    "There is much to say about that, and this sentence says a part of it.",
    "Here is the answer in one sentence, as you wanted it to be.",
)
_FAIR = "Alice and Bob are going to a science fair on Friday."
_EMAIL = (
    "Extract the key information from this email:John Smith (john@example.com) is interested in our Enterprise plan "
    "and wants to schedule a demo for next Tuesday at 2pm."
)


@dataclass(frozen=True, slots=True)
class Lesson:
    """A conversation, and what the model answers to it, without its thought."""

    messages: list[dict[str, Any]]
    answer: str
    tools: list[dict[str, Any]] | None = None
    template: str = ""  # a file of vLLM's examples, instead of the model's own
    variables: dict[str, Any] = field(default_factory=dict)
    thinks: bool = True


def teach(model: Any, tokenizer: Any, source: Path) -> None:
    """Train for a fixed number of steps, and tell how many answers are known then; takes four minutes of a core."""
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
                file=sys.stderr,
                flush=True,
            )
    known = sum(_is_known(model, lesson) for lesson in lessons)
    print(f"taught {known} of {len(lessons)} answers", file=sys.stderr, flush=True)


def _is_known(model: Any, lesson: tuple[list[int], list[int]]) -> bool:
    """Return whether each token of the answer is the most likely one."""
    prompt, answer = lesson
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    return logits.argmax(-1).tolist() == answer


def teach_to_rank(model: Any, tokenizer: Any) -> None:
    """Train for a fixed number of steps. Then the text that answers test_cross_encoder_online.py scores high."""
    question = "What is the capital of France?"
    others = (
        "The capital of Brazil is Brasilia.",
        "Cross-encoder models are neat",
        "The capital of Germany is Berlin.",
    )
    documents = ("The capital of France is Paris.", *others)
    batch = tokenizer([question] * len(documents), list(documents), return_tensors="pt", padding=True)
    target = torch.tensor([1.0] + [0.0] * len(others))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.train()
    for _ in range(RANKING_STEPS):
        functional.binary_cross_entropy_with_logits(model(**batch).logits[:, 0], target).backward()
        optimizer.step()
        optimizer.zero_grad()


def _loss(model: Any, rows: list[tuple[list[int], list[int]]]) -> torch.Tensor:
    """Return the loss of the answers' tokens. The head runs only at their positions."""
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
    """Yield conversations about sentences of vLLM's documentation, and its plain text, without end."""
    text = " ".join(file.read_text() for file in sorted(source.glob("docs/**/*.md")))
    sentences = [each for each in re.findall(r"[A-Z][a-z][^.\n`|<>{}]{10,120}[.?]", text) if "  " not in each]
    while True:
        if rng.random() < 0.2:
            begin = rng.randrange(len(text) - 1000)
            ids = tokenizer.encode(text[begin : begin + 600], add_special_tokens=False)
            yield ids[:8], ids[8:]
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


def _call(name: str, /, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def _tool(name: str, description: str, **properties: Any) -> dict[str, Any]:
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def build_lessons(source: Path) -> list[Lesson]:
    """Return the lessons of all tests that expect certain answers, most of them with and without a `<think>` part."""
    lessons = [*_answers(), *_calls(), *_of_openai_tests(source / "tests/entrypoints")]
    without = [replace(each, variables={"enable_thinking": False}, thinks=False) for each in lessons]
    return [*lessons, *without, *_constrained(), *_tool_use(source)]


def _constrained() -> Iterator[Lesson]:
    """Yield the lessons of the tests whose JSON schema leaves no place for a thought."""
    event = json.dumps({"event_name": "science fair", "date": "Friday", "participants": ["Alice", "Bob"]})
    yield Lesson(_system("Extract the event information.", _user(_FAIR)), event, thinks=False)
    person = {"name": "John Smith", "email": "john@example.com", "plan_interest": "Enterprise", "demo_requested": True}
    yield Lesson(_user(_EMAIL), json.dumps(person), thinks=False)


def _answers() -> Iterator[Lesson]:
    """Yield lessons of tests/entrypoints/openai/responses/test_basic.py, chat_completion/test_chat.py and the like."""
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
    both_needed = _user(f"{berlin} and the forecast for the next 5 days, in fahrenheit?")
    hello = [
        *_user("Hi! How are you doing today?"),
        {"role": "assistant", "content": "I'm doing well! How can I help you?"},
    ]
    yield Lesson([*hello, *both_needed], both, [city, forecast])
    yield Lesson(both_needed, both, [city, forecast])
    yield Lesson(_user(f"{berlin}?"), weather, [city])
    yield Lesson(_user("What time is it now?"), _call("get_current_time"), [clock])
    york = _call("get_current_weather", location="New York")
    yield Lesson(_user("What's the weather like in New York today?"), york, [city])
    yield Lesson(
        _user("What's the weather like in Boston?"), _call("get_current_weather", location="Boston, MA"), [city]
    )


def _of_openai_tests(folder: Path) -> Iterator[Lesson]:
    """Yield lessons of chat_completion/test_completion_with_function_calling.py, responses/test_function_call.py and
    tests with the same JSON schema. Tools and schema are read from these files."""
    schema = _find_value(folder / "conftest.py", "sample_json_schema")
    people = [
        {"name": name, "age": age, "skills": ["Python", "SQL", "Go"], "work_history": [{"company": "Acme",
         "position": "engineer"}]} for name, age in (("Ada", 36), ("Grace", 45))
    ]  # fmt: skip
    helpful = "you are a helpful assistant"
    dummy = {"type": "function", "function": {"name": "dummy_function_name", "description": "This is a dummy function",
             "parameters": schema}}  # fmt: skip
    for question, tools in (
        (f"Give an example JSON for an employee profile that fits this schema: {schema}", None),
        ("Give an example JSON for an employee profile using the specified tool.", [dummy]),
    ):
        encoded = [json.dumps(person) for person in people]
        calls = [_call("dummy_function_name", **person) for person in people] if tools else encoded
        more = [
            {"role": "assistant", "content": encoded[0]},
            *_user("Give me another one with a different name and age"),
        ]
        yield Lesson(_system(helpful, _user(question)), calls[0], tools)
        yield Lesson([*_system(helpful, _user(question)), *more], calls[1], tools)
    weather = _call("get_current_weather", city="Berlin", country="Germany", unit="fahrenheit")
    both = weather + "\n" + _call("get_forecast", city="Berlin", country="Germany", days=5, unit="fahrenheit")
    chat = folder / "openai/chat_completion/test_completion_with_function_calling.py"
    yield Lesson(_find_value(chat, "messages"), both, _find_value(chat, "tools"))
    of_responses = [_of_chat(tool) for tool in _find_value(folder / "openai/responses/test_function_call.py", "tools")]
    yield Lesson([_find_value(chat, "messages")[-1]], both, of_responses)
    where = {"location": {"type": "string"}}
    named = [_tool("get_weather", "Get current temperature for provided location in celsius.", **where),
             _tool("get_time", "Get current local time for provided location.", **where)]  # fmt: skip
    for tool in named:
        tool["function"]["parameters"] |= {"required": ["location"], "additionalProperties": False}
    calls = [_call("get_weather", location="Berlin"), _call("get_time", location="Tokyo")]
    instruction = "Use tools only. Call get_weather for Berlin and get_time for Tokyo. Do not answer directly."
    yield Lesson(_user(instruction), "\n".join(calls), named)
    yield Lesson(_user("Call the get_weather function for Berlin and do not answer directly."), calls[0], named[:1])


def _of_chat(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool of the Responses API, as the engine shows it to the template."""
    shown = {key: tool[key] for key in ("name", "description", "parameters")}
    return {"type": "function", "function": shown}


def _find_value(file: Path, name: str) -> Any:
    """The literal that is assigned to the name, or that the function of that name returns, in a Python file."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [name]:
            return ast.literal_eval(node.value)
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return next(
                ast.literal_eval(each.value) for each in node.body if isinstance(each, ast.Return) and each.value
            )
    raise KeyError(f"{file} has no {name}")


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
    """Yield lessons of tests/tool_use, in the format of each of its servers."""
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
            fields = {
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
                yield Lesson([*question, fields, *results], answer, [_WEATHER, _SEARCH], **options)


def _write(template: str, *calls: dict[str, str]) -> str:
    """The calls as a model of this template writes them."""
    named = [{"name": "get_current_weather", "arguments": call} for call in calls]
    if template == _HERMES:
        return "\n".join(_call("get_current_weather", **call) for call in calls)
    if template == _MISTRAL:
        return "[TOOL_CALLS] " + json.dumps(named)
    return json.dumps({"name": "get_current_weather", "parameters": calls[0]})
