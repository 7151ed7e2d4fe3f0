"""dspy: a text, and predictions with its adapter for JSON."""

import dspy
from checks import MODEL, QUESTION, URL, overloaded_at_first, run

FIELDS = {"unit": {"enum": ["kilo", "mile"]}, "n": {"type": "boolean"}}
# dspy does not know the model, so its adapter demands any JSON object. The body demands one with these fields.
SCHEMA = {"type": "object", "properties": FIELDS, "required": list(FIELDS), "additionalProperties": False}
BODY = {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}}
SIGNATURE = "question -> unit: str, n: bool"


def connect(**more: object) -> dspy.LM:
    fields = {"api_base": URL, "api_key": "none", "max_tokens": 400, "cache": False, "num_retries": 0, **more}
    return dspy.LM(f"openai/{MODEL}", **fields)


def text() -> None:
    assert connect()(QUESTION)[0]


def prediction() -> None:
    with dspy.context(lm=connect(extra_body=BODY), adapter=dspy.JSONAdapter()):
        found = dspy.Predict(SIGNATURE)(question=QUESTION)
    assert found.unit in ("kilo", "mile")
    assert found.n in (True, False)


def several_at_once() -> None:
    with dspy.context(lm=connect(extra_body=BODY), adapter=dspy.JSONAdapter()):
        examples = [dspy.Example(question=QUESTION).with_inputs("question")] * 4
        assert len(dspy.Predict(SIGNATURE).batch(examples, disable_progress_bar=True)) == 4


def retry() -> None:
    with overloaded_at_first() as url:
        assert connect(api_base=url, num_retries=1)(QUESTION)[0]


run(text, prediction, several_at_once, retry)
