"""Prints configuration.md, from the settings of the four programs themselves: `python docs/configuration.py`.

Called by `make generate`, and by `make check-generated`, which compares. The one place that imports all parts.
"""

from typing import Any

from conveyor_engine.config.sources import PROGRAM as ENGINE
from conveyor_gateway.settings import PROGRAM as GATEWAY
from conveyor_metrics.settings import PROGRAM as METRICS
from conveyor_operator.settings import PROGRAM as OPERATOR
from conveyor_process.settings import Program, Row

_HEAD = """\
# Configuration

Written by `make generate`; do not edit.

A setting can be a flag (`--port=80`) or an environment variable. The flag takes precedence over the variable, and the
variable over the default. An unknown setting or an invalid value ends the process with exit code 2 and one sentence.
The chart sets some settings. Use `operator.extraArgs`, `gateway.extraArgs` and `metrics.extraArgs` for the others, for
example `[--workers=16]`.

The engine also reads a YAML file (`--config FILE`). Variables take precedence over the file. Its keys are the settings
in snake_case (`max_num_seqs: 8`). The operator writes this file from the InferenceService. `pod.env` may set a few of
the variables.
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
    parts.append(section("Engine", ENGINE, " serve"))
    print("\n".join((_HEAD, *parts)), end="")
