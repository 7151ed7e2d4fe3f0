"""Prints configuration.md, from the settings of the five programs themselves: `python docs/configuration.py`.

Called by `make generate`, and by `make check-generated`, which compares. The one place that imports all parts.
"""

from typing import Any

from conveyor_console.settings import PROGRAM as CONSOLE
from conveyor_engine.config.sources import PROGRAM as ENGINE
from conveyor_gateway.settings import PROGRAM as GATEWAY
from conveyor_jobs.settings import PROGRAM as JOBS
from conveyor_metrics.settings import PROGRAM as METRICS
from conveyor_operator.settings import PROGRAM as OPERATOR
from conveyor_process.settings import Program, Row

_HEAD = """\
# Configuration

Written by `make generate`; do not edit.

You can give a setting as a flag (`--port=80`) or as an environment variable. Flags take precedence over variables, and
variables over the defaults. After an unknown setting or an invalid value, the process exits with code 2 and an error
message.

The chart sets some of the flags. For the others, use `operator.extraArgs`, `gateway.extraArgs` and `metrics.extraArgs`,
for example `[--workers=16]`.

The engine also reads a YAML file (`--config FILE`). Its keys are the settings in snake_case (`max_num_seqs: 8`).
Variables take precedence over the file. The operator writes this file from the InferenceService. A few of the variables
can be set in `pod.env`.
"""


def section(title: str, program: Program[Any], command: str = "") -> str:
    lines = [f"## {title}", f"`python -m {program.module}{command}`. {program.description}", ""]
    lines += ["| flag | variable | value | default | meaning |", "| --- | --- | --- | --- | --- |"]
    lines += [line(row) for row in program.rows()]
    return "\n".join(lines) + "\n"


def line(row: Row) -> str:
    default = f"`{row.default}`" if row.default else "–"
    return f"| `{row.flag}` | `{row.variable}` | {row.must_be} | {default} | {row.meaning} |"


if __name__ == "__main__":
    parts = [section("Operator", OPERATOR), section("Gateway", GATEWAY), section("Metrics server", METRICS)]
    parts.append(section("Console", CONSOLE))
    parts.append(section("Offline job", JOBS))
    parts.append(section("Engine", ENGINE, " serve"))
    print("\n".join((_HEAD, *parts)), end="")
