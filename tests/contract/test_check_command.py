"""Tests that the engine takes the command of the Job that tries a configuration before a rollout removes an engine."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.operator.builders import build, desire, make_deployment, make_observed

from conveyor_api import names
from conveyor_operator.inferenceservice.check import TOO_OLD

CACHE = {"uri": "hf://a/b", "cache": {"strategy": "PVC", "size": "1Gi"}}


def run(command: list[str], folder: Path) -> tuple[int, str]:
    """Run an engine's command. Returns the exit code and the termination message."""
    log = folder / "termination-log"
    done = subprocess.run(
        [sys.executable, *command[1:]], env={**os.environ, names.TERMINATION_LOG_ENV: str(log)}, check=False
    )
    return done.returncode, json.loads(log.read_text())["message"] if log.exists() else ""


@pytest.mark.parametrize("more", ["", "max_seqs: 4\n"])
def test_the_job_s_command_reads_what_the_operator_writes(tmp_path: Path, more: str) -> None:
    removing = make_observed(deployment=make_deployment(1, template_hash="old"))
    (job,) = (child for child in desire(removing, model=CACHE).children if child["kind"] == "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    (config,) = (child["data"] for (kind, _), child in build(model=CACHE).items() if kind == "ConfigMap")
    file = tmp_path / "engine.yaml"
    file.write_text(config["engine.yaml"] + more)
    command: list[Any] = [str(file) if each == names.ENGINE_CONFIG_PATH else each for each in container["command"]]
    code, message = run(command, tmp_path)
    assert (code, "max_seqs" in message) == ((2, True) if more else (0, False))


def test_an_engine_without_the_command_says_what_the_operator_looks_for(tmp_path: Path) -> None:
    code, message = run(["python", "-m", "conveyor_engine", "chek"], tmp_path)
    assert code == 2
    assert TOO_OLD.replace("check", "chek") in message
