"""Tests that every process writes its log in the same two formats, so that the logs can be merged by time."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.process.lines import read_json, read_logfmt

from conveyor_process.log import split_template
from e2e.cluster.paths import REPOSITORY

READERS: dict[str, Callable[[str], dict[str, Any]]] = {"logfmt": read_logfmt, "json": read_json}
PROCESSES = {
    "conveyor_operator": ["--admin-port=0"],
    "conveyor_gateway": ["--port=0", "--admin-port=0"],
    "conveyor_metrics": ["--https-port=0", "--admin-port=0"],
    "conveyor_console": ["--port=0"],
}
FOLDERS = ("lib", "operator", "gateway", "metrics", "console", "jobs", "cli", "engine/conveyor_engine")
LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}


def check(line: dict[str, Any], key: str = "event") -> None:
    """Check the keys with which each line begins. The time is in UTC, whatever the machine's time zone."""
    assert list(line)[:3] == ["time", "level", "event"]
    assert key in line
    time = datetime.fromisoformat(line["time"])
    assert line["time"].endswith("Z")
    assert abs(time - datetime.now(UTC)) < timedelta(minutes=5)
    assert line["level"] in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


@pytest.mark.parametrize("log_format", READERS)
@pytest.mark.parametrize("module", PROCESSES)
def test_a_program_writes_pairs_that_begin_with_the_time(module: str, log_format: str, nowhere: Path) -> None:
    given = [f"--kubeconfig={nowhere}", f"--log-format={log_format}", "--log-level=debug", *PROCESSES[module]]
    with subprocess.Popen(
        [sys.executable, "-m", module, *given],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TZ": "Asia/Tokyo"},
    ) as process:
        assert process.stderr is not None
        for _ in range(2):
            check(READERS[log_format](process.stderr.readline().rstrip("\n")))
        process.kill()


@pytest.mark.parametrize("log_format", READERS)
@pytest.mark.parametrize("by_flag", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_engine_does_so_too(by_flag: bool, log_format: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "conveyor_engine", "serve", f"--model={tmp_path / 'none'}"]
    flags = [f"--log-format={log_format}"] if by_flag else []
    variables = {} if by_flag else {"CONVEYOR_ENGINE_LOG_FORMAT": log_format}
    done = subprocess.run([*command, *flags], capture_output=True, text=True, env={**os.environ, **variables})
    *lines, last = [READERS[log_format](line) for line in done.stderr.splitlines()]
    for line in lines:
        check(line)
    check(last, "reason")
    assert (last["event"], last["reason"]) == ("cannot_start", "ModelNotFound")


def find_messages(file: Path) -> Iterator[tuple[int, str | None, int]]:
    """Yield line, template and number of values of each logging call; None for a value that is not a literal."""
    for node in ast.walk(ast.parse(file.read_text())):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LEVELS):
            continue
        if isinstance(node.func.value, ast.Name) and node.func.value.id in ("logger", "_log", "logging"):
            first = node.args[0]
            literal = first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else None
            has_stars = any(isinstance(argument, ast.Starred) for argument in node.args)
            yield node.lineno, literal, -1 if has_stars else len(node.args) - 1


FILES = sorted(file for folder in FOLDERS for file in (REPOSITORY / folder).rglob("*.py"))


def test_every_message_of_ours_is_an_event_with_a_place_for_each_value() -> None:
    found = [(file, *message) for file in FILES for message in find_messages(file)]
    assert len(found) > 40
    for file, number, template, num_values in found:
        if template is None and file.name == "engine_client.py":
            continue  # a line of the engine process, which is one already
        where = f"{file.relative_to(REPOSITORY)}:{number}"
        pairs = split_template(template or "")
        assert pairs is not None, where
        assert num_values in (-1, sum(value.count("%") for _, value in pairs)), where
        assert not {"time", "level", "traceback"} & {key for key, _ in pairs}, where


def test_each_key_is_always_a_number_or_always_text() -> None:
    """A typed index of log lines would drop the lines of the type that it saw second."""
    kinds: dict[str, dict[bool, str]] = {}
    for file in FILES:
        for number, template, _ in find_messages(file):
            for key, text in split_template(template or "") or ():
                is_number = re.fullmatch(r"%[.\d]*[dfg]|-?[\d.]+", text) is not None
                kinds.setdefault(key, {})[is_number] = f"{file.relative_to(REPOSITORY)}:{number}"
    assert {key: places for key, places in kinds.items() if len(places) > 1} == {}
