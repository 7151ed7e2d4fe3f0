"""Tests answers that must follow a form, on a real server with a random model. Only the grammar makes them valid."""

import json
from typing import Any

import jsonschema
import pytest
from openai import OpenAI
from pydantic import BaseModel
from tests.engine.processes import EngineServer

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 10}, "size": {"type": "integer", "maximum": 99}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA, "strict": True}}
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("completions", {"prompt": "the fox"}),
    ("chat/completions", {"messages": [{"role": "user", "content": "the fox"}]}),
]


def text_of(choice: Any) -> str:
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def send(server: EngineServer, path: str, body: dict[str, Any]) -> Any:
    response = server.post(f"/v1/{path}", {"max_tokens": 400, "temperature": 1, "seed": 0, **body})
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize(("path", "question"), CALLS)
@pytest.mark.parametrize(
    "form",
    [
        {"response_format": FORMAT},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        {"guided_json": SCHEMA},
        {"json_schema": json.dumps(SCHEMA)},
    ],
    ids=lambda form: next(iter(form)),
)
def test_an_answer_is_valid_by_its_schema(
    server: EngineServer, path: str, question: dict[str, Any], form: dict[str, Any]
) -> None:
    for seed in range(3):
        choice = send(server, path, {**question, **form, "seed": seed, "n": 2})["choices"][seed % 2]
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(text_of(choice)), SCHEMA)


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"structured_outputs": {"choice": ["yes", "no"]}}, {"yes", "no"}),
        ({"guided_choice": ["ja", "nein"]}, {"ja", "nein"}),
        ({"guided_regex": "(one|two)!"}, {"one!", "two!"}),
        ({"regex": "(one|two)!"}, {"one!", "two!"}),
        ({"structured_outputs": {"grammar": 'start: "x" | "y"'}}, {"x", "y"}),
        ({"ebnf": 'root ::= "x" | "y"'}, {"x", "y"}),
        ({"guided_grammar": 'root ::= "x" | "y"'}, {"x", "y"}),
    ],
)
def test_an_answer_is_one_of_what_is_allowed(server: EngineServer, form: dict[str, Any], words: set[str]) -> None:
    seen = set()
    for seed in range(8):
        (choice,) = send(server, "completions", {"prompt": "a", **form, "seed": seed, "temperature": 1.8})["choices"]
        assert choice["finish_reason"] == "stop"
        seen.add(choice["text"])
    assert seen <= words


def test_a_stream_says_the_same_as_the_whole(server: EngineServer) -> None:
    body = {"prompt": "a", "response_format": FORMAT, "seed": 3, "max_tokens": 200}
    whole = send(server, "completions", body)["choices"][0]
    lines = server.post("/v1/completions", {"temperature": 1, "seed": 0, **body, "stream": True}).text.split("\n\n")
    chunks = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    assert [chunk["finish_reason"] for chunk in chunks][-1] == "stop"


def test_any_object_is_one_and_may_be_cut_at_the_limit(server: EngineServer) -> None:
    body = {"prompt": "a", "response_format": {"type": "json_object"}, "max_tokens": 30}
    for seed in range(5):
        choice = send(server, "completions", {**body, "seed": seed})["choices"][0]
        assert choice["text"].startswith("{")
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(choice["text"]), dict)


def test_text_is_free(server: EngineServer) -> None:
    body = {"prompt": "a", "seed": 1, "max_tokens": 20, "ignore_eos": True}
    free = send(server, "completions", body)["choices"]
    assert send(server, "completions", {**body, "response_format": {"type": "text"}})["choices"] == free


class Thing(BaseModel):
    name: str
    sizes: list[int]


@pytest.mark.parametrize("temperature", [0, 1])
def test_the_client_parses_its_own_model(server: EngineServer, temperature: float) -> None:
    with OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        for seed in range(3):
            answer = client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "a thing"}], seed=seed, max_tokens=2000,
                temperature=temperature, extra_body={"guided_json": Thing.model_json_schema()},
            )  # fmt: skip
            choice = answer.choices[0]
            if choice.finish_reason == "stop":
                Thing.model_validate_json(choice.message.content or "")


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        (
            {"response_format": {"type": "xml"}},
            "response_format",
            "type is text, json_object, json_schema or structural_tag",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": 5, "schema": {}}}},
            "response_format",
            "json_schema.name that is a string",
        ),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs", "json_object that is true"),
        ({"guided_json": {"type": "thing"}}, "guided_json", "cannot be followed"),
        ({"guided_json": "{"}, "guided_json", "not JSON"),
        ({"guided_regex": "[a"}, "guided_regex", "unclosed"),
        ({"guided_choice": []}, "guided_choice", "1 to 1024"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs", "not JSON"),
        (
            {"response_format": {"type": "structural_tag", "structures": [], "triggers": ["<"]}},
            "response_format",
            "1 to",
        ),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "or"}}},
            "response_format",
            "structures and triggers, or a format",
        ),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "exclude each other"),
        ({"ebnf": ""}, "ebnf", "non-empty text"),
    ],
)
def test_what_is_no_form_is_refused_with_its_field(
    server: EngineServer, fields: dict[str, Any], param: str, words: str
) -> None:
    for path, question in CALLS:
        response = server.post(f"/v1/{path}", {**question, **fields})
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == param
        assert words in error["message"]


def test_a_form_and_other_limits_that_leave_nothing_end_the_request_with_a_reason(server: EngineServer) -> None:
    body = {"prompt": "a", "guided_choice": ["yes"], "allowed_token_ids": [5]}
    response = server.post("/v1/completions", body)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "invalid_value")
    assert "structured output" in error["message"]


def count_relaxed(server: EngineServer, keyword: str) -> float:
    name, label = "conveyor_engine_relaxed_keywords_total{", f'keyword="{keyword}"'
    lines = server.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name) and label in line)


def test_a_relaxed_keyword_is_named_in_a_header_and_counted(server: EngineServer) -> None:
    tags = {"type": "array", "items": {"type": "integer"}, "maxItems": 2, "uniqueItems": True}
    schema = {"type": "object", "properties": {"tags": tags}, "required": ["tags"]}
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    named = "uniqueItems at #/properties/tags"
    before = count_relaxed(server, "uniqueItems")
    bodies = [
        ("/v1/completions", {"prompt": "a", "response_format": form}),
        ("/v1/completions", {"prompt": "a", "response_format": form, "stream": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "response_format": form}),
        ("/v1/responses", {"input": "a", "text": {"format": {"type": "json_schema", "name": "it", "schema": schema}}}),
    ]
    for path, body in bodies:
        limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
        response = server.post(path, {**body, limit: 50})
        assert response.status_code == 200, response.text
        assert named in response.headers["warning"]
    assert count_relaxed(server, "uniqueItems") == before + len(bodies)
    plain = server.post("/v1/completions", {"prompt": "a", "guided_json": SCHEMA, "max_tokens": 5})
    assert "warning" not in plain.headers
    strict = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}}
    response = server.post("/v1/completions", {"prompt": "a", "response_format": strict})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(f"response_format cannot be followed: {named}: ")


def test_an_error_about_a_tool_names_the_keyword_and_nothing_of_the_grammar(server: EngineServer) -> None:
    good = {"type": "function", "function": {"name": "a", "parameters": {"type": "object", "properties": {}}}}
    schema = {"type": "object", "properties": {"x": {"type": "string", "minLength": "1"}}}
    bad = {"type": "function", "function": {"name": "b", "parameters": schema}}
    body = {"messages": [{"role": "user", "content": "a"}], "tools": [good, bad], "tool_choice": "required"}
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == (
        "tools[1].function.parameters cannot be followed: minLength at #/properties/x: the value must be a whole number"
        " that is not negative"
    )
    assert response.json()["error"]["param"] == "tools[1].function.parameters"


def test_a_schema_that_never_ends_is_refused_before_it_runs(server: EngineServer) -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "required": ["next"]}
    response = server.post(
        "/v1/completions", {"prompt": "a", "guided_json": {"$ref": "#/$defs/node", "$defs": {"node": node}}}
    )
    assert response.status_code == 400
    assert "$ref at #/$defs/node: it refers to itself without an end" in response.json()["error"]["message"]
