"""Tests that settings with the same meaning have the same name and errors of the same form in all programs."""

import subprocess
import sys

import pytest

from conveyor_console.settings import PROGRAM as CONSOLE
from conveyor_engine.config.sources import PROGRAM as ENGINE
from conveyor_gateway.settings import PROGRAM as GATEWAY
from conveyor_metrics.settings import PROGRAM as METRICS
from conveyor_operator.settings import PROGRAM as OPERATOR


def test_a_setting_of_all_three_programs_has_one_name_and_one_default() -> None:
    programs = (OPERATOR, GATEWAY, METRICS)
    rows_of = [{(row.flag, row.must_be, row.default) for row in program.rows()} for program in programs]
    alike = {flag for flag, _, _ in set.intersection(*rows_of)}
    assert alike == {"--host", "--admin-port", "--system-namespace", "--kubeconfig", "--log-format", "--log-level"}


def test_operator_and_gateway_watch_namespaces_by_the_same_name() -> None:
    assert all("--watch-namespaces" in {row.flag for row in program.rows()} for program in (OPERATOR, GATEWAY))


@pytest.mark.parametrize(
    ("module", "given"),
    [
        ("conveyor_operator", []),
        ("conveyor_gateway", []),
        ("conveyor_metrics", []),
        ("conveyor_console", []),
        ("conveyor_engine", ["serve"]),
    ],
)
def test_a_wrong_value_ends_every_program_with_one_sentence_and_code_2(module: str, given: list[str]) -> None:
    flag = "--port" if module in ("conveyor_gateway", "conveyor_console", "conveyor_engine") else "--admin-port"
    done = subprocess.run(
        [sys.executable, "-m", module, *given, f"{flag}=http"], capture_output=True, text=True, check=False
    )
    name = flag.removeprefix("--").replace("-", "_")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert f"flag {flag}: `{name}` must be a port number from 0 to 65535, not 'http'" in done.stderr


def test_a_setting_of_one_name_may_be_the_same_in_every_program() -> None:
    meanings: dict[str, set[str]] = {}
    for program in (OPERATOR, GATEWAY, METRICS, CONSOLE, ENGINE):
        for row in program.rows():
            meanings.setdefault(row.flag, set()).add(row.must_be)
    # A gateway drains as long as the longest request of any service may take, a day.
    assert {flag for flag, words in meanings.items() if len(words) > 1} == {"--drain-timeout-seconds"}
