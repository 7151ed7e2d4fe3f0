"""mirascope's calls: a text, a stream, a tool that is called and its result, an error."""

from checks import MODEL, URL, overloaded_at_first, run
from mirascope import llm

CITIES: list[str] = []
QUESTION = "How is the weather in Paris?"

llm.register_provider("openai:completions", scope="conveyor/", base_url=URL, api_key="none")


@llm.tool
def get_weather(city: str) -> int:
    """The weather."""
    CITIES.append(city)
    return 21


def build(model: str = MODEL, **params: object) -> llm.Model:
    return llm.Model(f"conveyor/{model}", max_tokens=200, **params)


def text() -> None:
    answer = build().call(QUESTION)
    assert answer.text() == "Yes."


def stream() -> None:
    answer = build().stream(QUESTION)
    assert "".join(answer.text_stream()).strip() == "Yes."


def tool_loop() -> None:
    answer = build().call(QUESTION, tools=[get_weather])
    answer = answer.resume(answer.execute_tools())
    assert CITIES == ["Paris"]
    assert "21" in answer.text()


def abort() -> None:
    pieces = build().stream(QUESTION).text_stream()
    next(pieces)
    pieces.close()
    text()


def retry() -> None:
    with overloaded_at_first() as url:
        llm.register_provider("openai:completions", scope="retried/", base_url=url, api_key="none")
        assert llm.Model(f"retried/{MODEL}", max_tokens=200).call(QUESTION).text() == "Yes."


def errors() -> None:
    try:
        build("no-such-model").call(QUESTION)
    except llm.NotFoundError:
        return
    raise AssertionError("the model does not exist")


run(text, stream, tool_loop, abort, retry, errors)
