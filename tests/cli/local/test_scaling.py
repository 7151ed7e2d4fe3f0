"""Engines follow the requests: a burst, zero and back, and the limits of the queue."""

import concurrent.futures
import re
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import yaml
from tests.cli.local.running import Running, build_service, free_port, read_page

AT_ONCE = {"scaleUp": {"stabilizationWindowSeconds": 0}, "scaleDown": {"stabilizationWindowSeconds": 1}}


@pytest.mark.slow
def test_a_burst_scales_up_and_down_and_is_drawn(tmp_path: Path, models: Path) -> None:
    """The command is that of docs/local.md."""
    autoscaling = {"minReplicas": 1, "maxReplicas": 2, "behavior": AT_ONCE}
    (tmp_path / "service.yaml").write_text(yaml.safe_dump(build_service(autoscaling=autoscaling)))
    flags = shlex.split(read_page("conveyor run").partition(" ")[2])
    flags += ["--port", str(free_port()), "--volume", f"models={models}", "--cache", "cache", "--sync-period", "1"]
    flags += ["--ask", "How are you?"]
    command = [sys.executable, "-m", "conveyor_local", *flags]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "default/chat: 1 -> 2 engines" in done.stdout
    assert " 0 failed; " in done.stdout
    assert re.search(r"^> How are you\?\n.*\S.*\n", done.stdout, re.MULTILINE), done.stdout
    assert "; 1 -> 2 -> 1 engines; " in done.stdout
    assert ET.parse(tmp_path / "load.svg").getroot().tag.endswith("svg")


def test_an_idle_service_goes_to_zero_and_the_next_request_waits_for_an_engine(tmp_path: Path, models: Path) -> None:
    zero = build_service(
        autoscaling={"minReplicas": 0, "maxReplicas": 1, "idleTimeout": "5s"}, queue={"timeout": "10m"}
    )
    with Running(tmp_path, models, zero) as running:
        running.wait_ready()
        assert running.engines() == []
        assert running.chat().status_code == 200
        running.wait_for("default/chat: 1 -> 0 engines")
        running.wait("engine less", lambda: running.engines() == [])
        assert running.chat().status_code == 200
        running.terminate()
        assert running.wait_ended() == 0


@pytest.mark.slow
def test_the_queue_s_limit_and_timeout_are_the_service_s(tmp_path: Path, models: Path) -> None:
    """One request runs, one waits until its time is over, and there is no place for others."""
    one = build_service(
        batching={"mode": "None"}, engine={"device": "Auto", "maxQueuedRequests": 1},
        queue={"maxRequests": 1, "timeout": "1s"},
    )  # fmt: skip
    with Running(tmp_path, models, one) as running, concurrent.futures.ThreadPoolExecutor(8) as pool:
        running.wait_ready()
        futures = [pool.submit(running.chat, tokens=4000) for _ in range(8)]
        answers = [each.result() for each in futures]
        found = {answer.json()["error"]["code"] for answer in answers if answer.status_code != 200}
        assert found == {"queue_full", "queue_timeout"}
        assert any(answer.status_code == 200 for answer in answers)


@pytest.mark.slow
def test_without_autoscaling_the_number_stays(tmp_path: Path, models: Path) -> None:
    zero = build_service(autoscaling={"minReplicas": 0, "maxReplicas": 3})
    with Running(tmp_path, models, zero, flags=("--no-autoscaling",)) as running:
        running.wait_ready()
        assert len(running.engines()) == 1
        assert "the autoscaler" not in running.output
