"""The engine runs without what other systems lack: Triton, uvloop, and what only Linux has. No other system ran it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.engine.processes import EngineServer, environment
from tests.hidden import hide_packages

HIDDEN = ("triton", "uvloop")
BODY = {"model": "tiny", "prompt": "one two three", "max_tokens": 8, "temperature": 0}


def test_the_same_tokens_come_without_triton_uvloop_and_functions_of_linux(
    tmp_path: Path, chat_model: Path, server: EngineServer
) -> None:
    hidden = hide_packages(tmp_path / "hidden", *HIDDEN, linux=True)
    with EngineServer(tmp_path / "engine", chat_model, packages=hidden) as bare:
        answer = bare.wait_ready().post("/v1/completions", BODY)
        streamed = bare.post("/v1/completions", BODY | {"stream": True})
        schema = {"type": "json_schema", "json_schema": {"name": "one", "schema": {"enum": ["one"]}}}
        constrained = bare.post("/v1/completions", BODY | {"response_format": schema})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == server.post("/v1/completions", BODY).json()["choices"][0]["text"]
    assert constrained.json()["choices"][0]["text"] == '"one"'
    assert streamed.text.rstrip().endswith("[DONE]")


@pytest.mark.parametrize("name", HIDDEN)
def test_a_hidden_package_is_not_found(name: str, tmp_path: Path) -> None:
    """Otherwise the test above would show nothing."""
    path = os.pathsep.join((environment()["PYTHONPATH"], str(hide_packages(tmp_path, name))))
    done = subprocess.run(
        [sys.executable, "-c", f"import {name}"], env=environment(PYTHONPATH=path), capture_output=True, text=True
    )
    assert f"No module named '{name}'" in done.stderr
