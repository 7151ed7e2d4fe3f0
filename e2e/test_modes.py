"""The four batching modes, one after the other: each answers two requests at once, and all agree on greedy tokens."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from openai import OpenAI

from e2e import kube
from e2e.gateway import service_url
from e2e.services import service

# A batch of two is full and starts at once, without waiting for the window's end.
MODES = {
    "None": {"mode": "None"},
    "Static": {"mode": "Static", "maxBatchSize": 2, "window": "30s"},
    "Dynamic": {"mode": "Dynamic", "maxBatchSize": 2, "window": "30s"},
    "Continuous": {"mode": "Continuous", "maxBatchSize": 2},
}
QUESTIONS = ("How do I use the with statement?", "How do I use the for statement?")


def test_every_mode_answers_two_at_once_and_all_agree_on_greedy_tokens(namespace: str) -> None:
    answers = {}
    for mode, batching in MODES.items():
        name = mode.lower()
        # In bfloat16 a batch of two may round otherwise than a batch of one.
        kube.apply(service(name, batching=batching, engine={"device": "Auto", "dtype": "Float32"}), namespace)
        kube.wait_ready(name, namespace)
        with ThreadPoolExecutor() as clients:
            answers[mode] = tuple(clients.map(lambda question, name=name: chat(name, namespace, question), QUESTIONS))
        if mode != "Continuous":  # there, the second request may come after the first has ended
            assert (steps_of_two(name, namespace) > 0) == (mode != "None"), mode
        kube.kubectl("delete", "infsvc", name, "-n", namespace)
    assert all(text.strip() for text in answers["Continuous"]), answers
    assert len(set(answers["Continuous"])) == 2, answers
    assert len(set(answers.values())) == 1, answers


def steps_of_two(name: str, namespace: str) -> float:
    """Return how many of the engine's steps had more than one request."""
    (pod,) = kube.list_("pods", namespace, f"conveyor.dev/inference-service={name}")
    # From within the pod: the engines' NetworkPolicy lets in the gateways alone.
    read = "import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:8000/metrics').read().decode())"
    text = kube.kubectl("exec", "-n", namespace, pod["metadata"]["name"], "-c", "engine", "--", "python", "-c", read)
    bucket, count = (
        re.search(rf"^conveyor_engine_batch_size_{series} (\S+)$", text, re.MULTILINE)
        for series in (r'bucket\{.*le="1\.0".*\}', r"count\{.*\}")
    )
    assert bucket
    assert count
    return float(count[1]) - float(bucket[1])


def chat(name: str, namespace: str, question: str = QUESTIONS[0]) -> str:
    client = OpenAI(base_url=service_url(name, namespace), api_key="none", max_retries=0, timeout=60)
    messages = [{"role": "user", "content": question}]
    answer = client.chat.completions.create(model=name, messages=messages, max_tokens=60, temperature=0)
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 0
    text = answer.choices[0].message.content
    if text is None:
        pytest.fail(f"no content in {answer}")
    return text
