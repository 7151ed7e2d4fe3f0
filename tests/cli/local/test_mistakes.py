"""What cannot run is reported in one sentence, and the run ends."""

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tests.cli.local.running import Running, build_service, free_port

from conveyor_local.command import main

ASLEEP = {"autoscaling": {"minReplicas": 0, "maxReplicas": 1}}


def test_a_port_in_use_is_named(tmp_path: Path, models: Path) -> None:
    service = tmp_path / "service.yaml"
    service.write_text(yaml.safe_dump(build_service(**ASLEEP)))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        flags = ["--port", str(port), "--volume", f"models={models}", "--cache", str(tmp_path / "cache")]
        command = [sys.executable, "-m", "conveyor_local", "run", str(service), *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stderr == f"conveyor run: cannot listen on 127.0.0.1 port {port}: Address already in use\n"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--port", "80"], "must be a port from 1024 to 65535"),
        (["--volume", "models"], "must be NAME=DIR"),
        (["--sync-period", "0"], "must be seconds from 0.1"),
        (["--load", "0"], "must be a number from 1 to 1000"),
    ],
)
def test_a_wrong_flag_is_named(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["run", "service.yaml", *flags])
    assert words in capsys.readouterr().err


def test_a_folder_without_a_model_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "models" / "chat").mkdir(parents=True)
    with Running(tmp_path / "run", tmp_path / "models", build_service()) as running:
        assert running.wait_ended() == 1
        printed = running.output.splitlines()[-1]
        assert printed.startswith("conveyor run: default/chat: pvc://models/chat: ")
        assert "so it is no model; it is empty" in printed


@pytest.mark.slow
def test_a_model_that_no_engine_can_load_ends_the_run(tmp_path: Path, models: Path) -> None:
    folder = tmp_path / "models" / "chat"
    folder.mkdir(parents=True)
    for file in (models / "chat").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["NoSuchModel"], "model_type": "none"}))
    with Running(tmp_path / "run", tmp_path / "models", build_service()) as running:
        assert running.wait_ended() == 1
        printed = running.output.splitlines()[-1]
        assert printed.startswith("conveyor run: default/chat: ")
        assert "config.json" in printed
        assert "its logs are in " in printed


def test_a_terminal_shows_a_table(tmp_path: Path, models: Path) -> None:
    service = tmp_path / "service.yaml"
    service.write_text(yaml.safe_dump(build_service(**ASLEEP)))
    ours, theirs = pty.openpty()
    flags = ["--port", str(free_port()), "--volume", f"models={models}", "--cache", str(tmp_path / "cache")]
    command = [sys.executable, "-m", "conveyor_local", "run", str(service), *flags]
    process = subprocess.Popen(command, stdout=theirs, stderr=subprocess.STDOUT)
    os.close(theirs)
    shown = b""
    try:
        while shown.count(b"SERVICE") < 3:  # drawn again and again, in place
            shown += os.read(ours, 4096)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert b"\x1b[2A" in shown
    assert re.search(rb"default/chat +0/0 +[0?] +0 +ScaledToZero: scaled to zero while idle", shown)
