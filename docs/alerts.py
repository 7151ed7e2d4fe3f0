"""Prints alerts.md, from the chart's alerting rules: `python docs/alerts.py`.

Called by `make generate`, and by `make check-generated`, which compares.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

RULES = Path(__file__).resolve().parents[1] / "charts" / "conveyor" / "alerts.yaml"
_TEST = "tests/alerts/test_alerts.py::test_each_alert_fires_for_its_cause_and_none_for_another"
_HEAD = """\
# Alerts

Written by `make generate` from the chart's `alerts.yaml`; do not edit.
The chart's value `prometheusRules.create` installs the alerts as a PrometheusRule.
`make alerts` tests them with promtool.
An alert with severity `critical` needs action now. One with severity `warning` can wait for working hours.
"""


def page() -> Iterator[str]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    yield _HEAD
    for rule in [rule for group in groups for rule in group["rules"]]:
        yield from _section(rule)


def _section(rule: dict[str, Any]) -> Iterator[str]:
    labels, annotations = rule["labels"], rule["annotations"]
    yield f"\n## {rule['alert']}\n`{labels['severity']}`, after {rule['for']}. {_plain(annotations['summary'])}\n\n"
    yield f"{annotations['description']}\n\n<!-- test: {_TEST} -->\n```\n{rule['expr']}\n```\n"


def _plain(summary: str) -> str:
    """Without Prometheus' templates."""
    for label in ("namespace", "inference_service", "pod", "watch"):
        summary = summary.replace("{{ $labels." + label + " }}", label.upper())
    return summary


if __name__ == "__main__":
    print("".join(page()), end="")
