"""openai for Python, with a service that reads images in chats."""

from checks import MODEL, SHAPES, URL, run
from openai import BadRequestError, OpenAI

client = OpenAI(base_url=URL, api_key="none", max_retries=0)
PICTURE = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{SHAPES}", "detail": "auto"}}
QUESTION = {"type": "text", "text": "What is this?"}
BOTH = "a red circle and a blue square"


def chat(*content: object, **options: object) -> object:
    messages = [{"role": "user", "content": [*content]}]
    return client.chat.completions.create(**{"model": MODEL, "messages": messages, "temperature": 0, **options})


def a_picture() -> None:
    answer = chat(PICTURE, QUESTION)
    assert answer.choices[0].message.content == chat(QUESTION, PICTURE).choices[0].message.content == BOTH
    assert answer.usage.prompt_tokens > 16


def a_conversation() -> None:
    turns = [
        {"role": "user", "content": [PICTURE, QUESTION]},
        {"role": "assistant", "content": BOTH},
        {"role": "user", "content": "How many shapes are there?"},
    ]
    answer = client.chat.completions.create(model=MODEL, messages=turns, temperature=0)
    assert answer.choices[0].message.content == "two"


def stream() -> None:
    chunks = list(chat(PICTURE, QUESTION, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == BOTH
    assert chunks[-1].usage.prompt_tokens == chat(PICTURE, QUESTION).usage.prompt_tokens


def several() -> None:
    one, two = (chat(QUESTION, *[PICTURE] * number).usage.prompt_tokens for number in (1, 2))
    assert two == one + 16


def responses() -> None:
    picture = {"type": "input_image", "image_url": PICTURE["image_url"]["url"], "detail": "auto"}
    content = [picture, {"type": "input_text", "text": QUESTION["text"]}]
    answer = client.responses.create(model=MODEL, input=[{"role": "user", "content": content}], temperature=0)
    assert answer.output_text == BOTH


def errors() -> None:
    for url, word in (("data:image/png;base64,AAAA", "is not an image"), ("https://example.com/a.png", "is a URL")):
        try:
            chat({"type": "image_url", "image_url": {"url": url}})
        except BadRequestError as error:
            named = error.message
        else:
            named = "nothing: it was accepted"
        assert word in named, named


run(a_picture, a_conversation, stream, several, responses, errors)
