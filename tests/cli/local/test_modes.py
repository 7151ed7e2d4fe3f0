"""The stories of the modes and of priorities, without a cluster."""

import concurrent.futures
import time
from pathlib import Path

import pytest
from tests.cli.local.running import Running, build_service

from e2e.test_modes import MODES, QUESTIONS


@pytest.mark.slow
def test_every_mode_answers_two_at_once_and_all_agree_on_greedy_tokens(tmp_path: Path, models: Path) -> None:
    """The modes and the questions are those of the story on a cluster."""
    services = [build_service(mode.lower(), batching=batching) for mode, batching in MODES.items()]
    with Running(tmp_path, models, *services) as running, concurrent.futures.ThreadPoolExecutor() as pool:
        running.wait_ready()

        def send(name: str, question: str) -> str:
            messages = [{"role": "user", "content": question}]
            body = {"model": name, "messages": messages, "max_tokens": 30, "temperature": 0}
            answer = running.http.post("/v1/chat/completions", json=body)
            text: str = answer.json()["choices"][0]["message"]["content"]
            return text

        answers = {mode: tuple(pool.map(send, [mode.lower()] * len(QUESTIONS), QUESTIONS)) for mode in MODES}
    assert len(set(answers["Continuous"])) == 2, answers
    assert len(set(answers.values())) == 1, answers


@pytest.mark.slow
def test_a_request_of_a_better_class_overtakes_those_that_wait(tmp_path: Path, models: Path) -> None:
    classes = [{"name": "chat", "level": 0}, {"name": "batch", "level": 10}]
    service = build_service(
        batching={"mode": "None"}, engine={"device": "Auto", "maxQueuedRequests": 1},
        queue={"classes": classes, "defaultClass": "batch"},
    )  # fmt: skip
    with Running(tmp_path, models, service) as running, concurrent.futures.ThreadPoolExecutor(8) as pool:
        running.wait_ready()

        def send(request_class: str) -> float:
            answer = running.http.post(
                "/default/chat/v1/completions",
                json={"prompt": "a", "max_tokens": 300, "ignore_eos": True},
                headers={"x-request-class": request_class},
            )
            assert answer.status_code == 200, answer.text
            return time.monotonic()

        batch = [pool.submit(send, "batch") for _ in range(6)]
        running.wait("first answer", lambda: any(each.done() for each in batch))
        urgent = pool.submit(send, "chat").result()
        assert max(each.result() for each in batch) > urgent
