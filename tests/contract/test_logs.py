"""Every process begins its log lines alike, so that one parser reads them all and orders them by time."""

import os
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

LINE = re.compile(r"time=(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z) level=[A-Z]+ \S+=\S+")
PROCESSES = {
    "conveyor_operator": ["--admin-port=0"],
    "conveyor_gateway": ["--port=0", "--admin-port=0"],
    "conveyor_metrics": ["--https-port=0", "--admin-port=0"],
}


@pytest.mark.parametrize("module", PROCESSES)
def test_a_line_begins_with_the_time_in_utc_as_one_word(module: str, nowhere: Path) -> None:
    command = [sys.executable, "-m", module, f"--kubeconfig={nowhere}", *PROCESSES[module]]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, "TZ": "Asia/Tokyo"}
    ) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        process.kill()
    assert (match := LINE.match(line)), line
    assert abs(datetime.fromisoformat(match[1]) - datetime.now(UTC)) < timedelta(minutes=5)


def test_the_engine_writes_them_so_too(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "conveyor_engine", "serve", f"--model={tmp_path / 'none'}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert LINE.match(done.stderr), done.stderr
