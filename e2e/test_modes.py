"""The four batching modes, one after the other in one service: each answers, and they agree on greedy tokens."""

import pytest
from openai import OpenAI

from e2e import kube
from e2e.gateway import service_url
from e2e.services import service

MODES = {
    "None": {"mode": "None"},
    "Static": {"mode": "Static", "maxBatchSize": 4, "window": "50ms"},
    "Dynamic": {"mode": "Dynamic", "maxBatchSize": 4, "window": "20ms"},
    "Continuous": {"mode": "Continuous", "maxBatchSize": 4},
}


def test_every_mode_answers_and_all_agree_on_greedy_tokens(namespace: str) -> None:
    answers = {}
    for mode, batching in MODES.items():
        name = mode.lower()
        kube.apply(service(name, batching=batching), namespace)
        kube.wait_ready(name, namespace)
        answers[mode] = ask(name, namespace)
        kube.kubectl("delete", "infsvc", name, "-n", namespace)
    assert answers["Continuous"].strip(), answers
    assert len(set(answers.values())) == 1, answers


def ask(name: str, namespace: str) -> str:
    client = OpenAI(base_url=service_url(name, namespace), api_key="none", max_retries=0, timeout=60)
    question = [{"role": "user", "content": "How do I use the with statement?"}]
    answer = client.chat.completions.create(model=name, messages=question, max_tokens=60, temperature=0)
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 0
    text = answer.choices[0].message.content
    if text is None:
        pytest.fail(f"no content in {answer}")
    return text
