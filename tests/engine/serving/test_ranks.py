"""An engine whose model is divided among two processes: it answers as any other, and ends when one of them does."""

import os
import re
import signal
from pathlib import Path

import pytest
from tests.engine.processes import EngineServer, children, wait_until


@pytest.mark.slow
def test_an_engine_of_two_ranks_answers_and_ends_with_the_other_one(chat_model: Path, tmp_path: Path) -> None:
    with EngineServer(tmp_path, chat_model, tensor_parallel_size=2) as server:
        body = {"prompt": "the cat", "max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
        assert server.wait_ready().post("/v1/completions", body).json()["usage"]["completion_tokens"] == 8
        (rank,) = children(server.engine_pid)
        assert re.search(rf"event=rank_started rank=1 pid={rank}\b", server.log)
        os.kill(rank, signal.SIGKILL)
        assert server.wait_exit() == 1
        termination = {"reason": "EngineError", "message": "the process of rank 1 of 2 was ended by SIGKILL"}
        assert server.termination() == termination


@pytest.mark.nightly
def test_the_other_rank_ends_with_the_engine(chat_model: Path, tmp_path: Path) -> None:
    with EngineServer(tmp_path, chat_model, tensor_parallel_size=2) as server:
        engine = server.wait_ready().engine_pid
        (rank,) = children(engine)
        os.kill(engine, signal.SIGKILL)
        assert server.wait_exit() == 1
        wait_until(lambda: not Path(f"/proc/{rank}").exists(), "the end of the other rank")


@pytest.mark.nightly
def test_heads_that_cannot_be_divided_are_reported_in_both_numbers(chat_model: Path, tmp_path: Path) -> None:
    with EngineServer(tmp_path, chat_model, tensor_parallel_size=7) as server:
        assert server.wait_exit() == 1
        termination = server.termination()
    assert termination["reason"] == "InvalidConfig"
    assert "`tensor_parallel_size: 7` does not divide the model's heads" in termination["message"]
