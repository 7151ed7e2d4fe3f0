"""A server in mode Static, from a request's bytes to its answer."""

from pathlib import Path
from typing import Any

import pytest
from tests.engine.processes import EngineServer


@pytest.mark.slow
def test_a_stop_string_ends_the_work_on_a_row_and_not_only_its_text(chat_model: Path, tmp_path: Path) -> None:
    body: dict[str, Any] = {"prompt": "the quick", "temperature": 0, "ignore_eos": True, "max_tokens": 24}
    with EngineServer(tmp_path, chat_model, batching_mode="static", batching_window_seconds=0) as server:
        server.wait_ready()
        text = server.post("/v1/completions", body).json()["choices"][0]["text"]
        stop = text[len(text) // 2 :][:3]
        before = server.metric("vllm:generation_tokens_total")
        answer = server.post("/v1/completions", {**body, "max_tokens": 2000, "stop": stop}).json()
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == (text[: text.index(stop)], "stop")
        computed = server.metric("vllm:generation_tokens_total") - before
        assert computed == answer["usage"]["completion_tokens"] <= 24
