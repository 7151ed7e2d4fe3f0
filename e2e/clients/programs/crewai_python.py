"""crewAI's model and agent: a text, an agent that calls a tool, an error."""

from checks import MODEL, URL, overloaded_at_first, run
from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool

ASKED = [{"role": "user", "content": "How is the weather in Paris?"}]
CITIES: list[str] = []


@tool("get_weather")
def get_weather(city: str) -> str:
    """The weather."""
    CITIES.append(city)
    return "21"


def build(model: str = MODEL, url: str = URL, max_retries: int = 0) -> LLM:
    return LLM(model=f"openai/{model}", base_url=url, api_key="none", max_tokens=200, max_retries=max_retries)


def text() -> None:
    assert build().call(ASKED) == "Yes."


def agent_with_a_tool() -> None:
    agent = Agent(role="a", goal="b", backstory="c", llm=build(), tools=[get_weather], max_iter=4)
    task = Task(description="How is the weather in Paris?", expected_output="The weather", agent=agent)
    result = Crew(agents=[agent], tasks=[task], verbose=False).kickoff()
    assert CITIES == ["Paris"], CITIES
    assert "21" in str(result)


def retry() -> None:
    with overloaded_at_first() as url:
        assert build(url=url, max_retries=1).call(ASKED) == "Yes."


def errors() -> None:
    reason = ""
    try:
        build("no-such-model").call(ASKED)
    except Exception as error:
        reason = str(error)
    assert "not served here" in reason, reason


run(text, agent_with_a_tool, retry, errors)
