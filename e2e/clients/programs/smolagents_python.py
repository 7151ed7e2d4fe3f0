"""smolagents' model and agent: a text, a stream, a call of a tool, an error."""

import openai
from checks import MODEL, URL, overloaded_at_first, run
from smolagents import OpenAIServerModel, tool

ASKED = [{"role": "user", "content": "How is the weather in Paris?"}]


@tool
def get_weather(city: str) -> int:
    """The weather.

    Args:
        city: The city.
    """
    return 21


def build(model: str = MODEL, url: str = URL, max_retries: int = 0) -> OpenAIServerModel:
    client = {"max_retries": max_retries}
    return OpenAIServerModel(model, api_base=url, api_key="none", client_kwargs=client, retry=False, max_tokens=200)


def text() -> None:
    answer = build().generate(ASKED)
    assert answer.content == "Yes."
    assert answer.token_usage.output_tokens > 0


def stream() -> None:
    deltas = list(build().generate_stream(ASKED))
    assert "".join(delta.content or "" for delta in deltas) == "Yes."
    assert any(delta.token_usage for delta in deltas)


def tool_call() -> None:
    answer = build().generate(ASKED, tools_to_call_from=[get_weather], tool_choice="auto")
    (call,) = answer.tool_calls
    assert call.function.name == "get_weather"
    assert "Paris" in str(call.function.arguments)


def abort() -> None:
    deltas = build().generate_stream(ASKED)
    next(deltas)
    deltas.close()
    text()


def retry() -> None:
    with overloaded_at_first() as url:
        assert build(url=url, max_retries=1).generate(ASKED).content == "Yes."


def errors() -> None:
    try:
        build("no-such-model").generate(ASKED)
    except openai.NotFoundError:
        return
    raise AssertionError("the model does not exist")


run(text, stream, tool_call, abort, retry, errors)
