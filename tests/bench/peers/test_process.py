"""A peer in another process, played by a script that counts: it works only when asked, and ends with its owner."""

import sys
from pathlib import Path

import pytest

from conveyor_bench.comparing.systems import generate
from conveyor_bench.peers import process
from conveyor_bench.peers.process import PeerProcess

COUNTS = """
import json, sys
log = open(sys.argv[1], "a", buffering=1)
def start(prompts, output_tokens):
    yield 0
    for number in range(1, output_tokens + 1):
        if number > 5:
            sys.exit("cannot count further")
        log.write("step\\n")
        yield number
    yield [[len(prompt)] * output_tokens for prompt in prompts]
for line in sys.stdin:
    ask = json.loads(line)
    run = start(**ask) if ask else run
    print(json.dumps(next(run)), flush=True)
log.write("over\\n")
"""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    uv = tmp_path / "uv"
    uv.write_text('#!/bin/sh\n[ "$1 $2 $4" = "run --python --script" ] || exit 9\nshift 4\nexec "$PYTHON" "$@"\n')
    uv.chmod(0o755)
    monkeypatch.setenv("UV", str(uv))
    monkeypatch.setenv("PYTHON", sys.executable)
    monkeypatch.setenv("CONVEYOR_CACHE", str(tmp_path / "cache"))
    (tmp_path / "counts.py").write_text(COUNTS)
    return tmp_path / "log"


def open_peer(log: Path) -> PeerProcess:
    return PeerProcess(str(log.with_name("counts.py")), log, "float32")


def test_it_computes_a_step_when_it_is_asked_for_one(log: Path) -> None:
    peer = open_peer(log)
    run = peer.start([[7, 7], [7]], 3)
    assert log.read_text() == ""
    assert [next(run), next(run)] == [1, 2]
    assert log.read_text() == "step\n" * 2
    assert next(run) == 3
    with pytest.raises(StopIteration) as stop:
        next(run)
    assert stop.value.value == [[2, 2, 2], [1, 1, 1]]
    assert generate(peer, [[7]], 2) == [[1, 1]], "another run in the same process"


def test_its_process_ends_with_it(log: Path) -> None:
    peer = open_peer(log)
    generate(peer, [[7]], 1)
    del peer
    assert log.read_text() == "step\nover\n"


def test_a_process_that_ends_too_early_is_told(log: Path, capfd: pytest.CaptureFixture[str]) -> None:
    peer = open_peer(log)
    with pytest.raises(RuntimeError, match=r"process ended.*counts\.py"):
        generate(peer, [[7]], 6)
    with pytest.raises(RuntimeError, match="process ended"):
        generate(peer, [[7]], 1)
    assert "cannot count further" in capfd.readouterr().err


def test_without_uv_the_command_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UV", raising=False)
    monkeypatch.setattr(process.shutil, "which", lambda _: None)
    with pytest.raises(SystemExit, match="cannot find uv"):
        process.find_uv()
