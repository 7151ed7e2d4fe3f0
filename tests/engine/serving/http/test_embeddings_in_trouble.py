"""Tests embeddings for clients that leave, and in an engine that drains."""

import threading
from pathlib import Path

import httpx
import pytest
from tests.engine.processes import IDLE, EngineServer
from tests.engine.serving.http.embedding_server import WAITING, Served, distance


def test_clients_that_leave_run_out_of_time_or_are_too_many_cost_nothing(chat_model: Path, tmp_path: Path) -> None:
    one = {"input": "the fox"}
    with EngineServer(tmp_path, chat_model, IDLE, task="embed", **WAITING) as server:
        server.wait_ready()
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.url + "/v1/embeddings", json=one, timeout=1.0)
        server.wait_load(waiting=0, running=0)
        assert server.metric("vllm:request_success_total", finished_reason="abort") == 1
        late = server.post("/v1/embeddings", one, **{"X-Request-Timeout-Seconds": "0.5"})
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
        server.wait_load(waiting=0, running=0)
        many = server.post("/v1/embeddings", {"input": ["the fox"] * 8193})
        assert (many.status_code, many.json()["error"]["param"]) == (400, "input")


@pytest.mark.slow
def test_a_drain_answers_those_who_wait_for_their_batch(tmp_path: Path) -> None:
    waiting, answers = Served("bert", tmp_path, **WAITING), []
    with waiting.server as server:
        server.wait_ready()
        thread = threading.Thread(target=lambda: answers.append(server.post("/v1/embeddings", {"input": "the fox"})))
        thread.start()
        server.wait_load(waiting=1)
        server.terminate()
        thread.join(60)
        assert [answer.status_code for answer in answers] == [200]
        vector = answers[0].json()["data"][0]["embedding"]
        assert distance(vector, waiting.expect(waiting.token_ids("the fox"))) < 1e-4
        assert server.wait_exit() == 0
