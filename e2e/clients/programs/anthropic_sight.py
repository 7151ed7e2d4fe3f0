"""Anthropic's client for Python, with a service that reads images in chats."""

from anthropic import Anthropic, BadRequestError
from checks import MODEL, SHAPES, URL, run

client = Anthropic(base_url=URL.removesuffix("/v1"), api_key="none", max_retries=0)
PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": SHAPES}}
BOTH = "a red circle and a blue square"


def ask(question: str, *history: object) -> dict:
    content = [PICTURE, {"type": "text", "text": question}] if not history else question
    messages = [*history, {"role": "user", "content": content}]
    return {"model": MODEL, "messages": messages, "max_tokens": 30, "extra_body": {"temperature": 0}}


def a_picture() -> None:
    call = ask("What is this?")
    answer = client.messages.create(**call)
    assert answer.content[0].text == BOTH
    counted = client.messages.count_tokens(model=MODEL, messages=call["messages"])
    assert counted.input_tokens == answer.usage.input_tokens > 16


def a_conversation() -> None:
    turns = [*ask("What is this?")["messages"], {"role": "assistant", "content": BOTH}]
    assert client.messages.create(**ask("What is on the right?", *turns)).content[0].text == "a blue square"


def stream() -> None:
    with client.messages.stream(**ask("What is this?")) as events:
        assert "".join(events.text_stream) == BOTH


def a_picture_from_a_tool() -> None:
    call = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [PICTURE]}
    turns = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}, call]},
        {"role": "user", "content": [result, {"type": "text", "text": "What is this?"}]},
    ]
    answer = client.messages.create(model=MODEL, messages=turns, max_tokens=30)
    assert answer.content
    assert answer.usage.input_tokens > 16


def errors() -> None:
    for source in (
        {"type": "url", "url": "https://example.com/a.png"},
        {"type": "base64", "media_type": "image/png", "data": "AAAA"},
    ):
        content = [{"type": "image", "source": source}]
        try:
            client.messages.create(model=MODEL, messages=[{"role": "user", "content": content}], max_tokens=1)
        except BadRequestError as error:
            named = error.body["error"]["type"]
        else:
            named = "nothing: it was accepted"
        assert named == "invalid_request_error", named


run(a_picture, a_conversation, stream, a_picture_from_a_tool, errors)
