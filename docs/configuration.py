"""Prints configuration.md, from the settings of the four programs themselves: `python docs/configuration.py`.

Called by `make generate`, and by `make check-generated`, which compares. The one place that imports all parts.
"""

from conveyor_engine.config.documentation import configuration_section
from conveyor_gateway.settings import PROGRAM as GATEWAY
from conveyor_kube.settings import Program, Row
from conveyor_metrics.settings import PROGRAM as METRICS
from conveyor_operator.settings import PROGRAM as OPERATOR

_HEAD = """\
# Configuration

Written by `make generate`; do not edit.

Operator, gateway and metrics server take each setting from, strongest first, its flag, its environment variable and the
default. An unknown one, and a value that it must not have, end the process with code 2 and one sentence. The chart sets
some of them; `operator.extraArgs`, `gateway.extraArgs` and `metrics.extraArgs` set the others, as `[--workers=16]`.
"""


def section(title: str, program: Program) -> str:
    lines = [f"## {title}", f"`python -m {program.module}`. {program.description}", ""]
    lines += ["| flag | variable | value | default | meaning |", "| --- | --- | --- | --- | --- |"]
    lines += [line(row) for row in program.rows()]
    return "\n".join(lines) + "\n"


def line(row: Row) -> str:
    default = f"`{row.default}`" if row.default else "–"
    return f"| `{row.flag}` | `{row.variable}` | {row.must_be} | {default} | {row.meaning} |"


if __name__ == "__main__":
    parts = (section("Operator", OPERATOR), section("Gateway", GATEWAY), section("Metrics server", METRICS))
    print("\n".join((_HEAD, *parts, configuration_section())), end="")
