"""Builds Prometheus's series from the metrics of a program and the labels of its scrape."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from conveyor_api.names import SYSTEM_NAMESPACE

LENGTH = 360  # samples, one each 30 s


@dataclass(frozen=True, slots=True)
class Series:
    """A series. `values` has promtool's notation."""

    name: str
    labels: Mapping[str, str]
    values: str

    def change(self, values: str, **labels: str) -> "Series":
        return replace(self, labels={**self.labels, **labels}, values=values)

    def write(self) -> dict[str, Any]:
        labels = ",".join(f'{name}="{value}"' for name, value in sorted(self.labels.items()))
        return {"series": f"{self.name}{{{labels}}}", "values": self.values}


def constant(value: float) -> str:
    return f"{value!r}x{LENGTH}"


def growing(step: float = 3) -> str:
    return f"0+{step!r}x{LENGTH}"


def scrape(page: str, program: str, number: int = 1, *, honor_labels: bool, **labels: str) -> Iterator[Series]:
    """Yield each sample of a page of /metrics as a constant series, with the labels of a PodMonitor's target.

    labels: those of another target than a program of the chart.
    """
    target = {
        "job": f"{SYSTEM_NAMESPACE}/conveyor",
        "namespace": SYSTEM_NAMESPACE,
        "container": program,
        "endpoint": "admin",
        "pod": f"conveyor-{program}-{number}",
        **labels,
    }
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            yield Series(sample.name, relabel(sample.labels, target, honor_labels), constant(sample.value))


def relabel(labels: Mapping[str, str], target: Mapping[str, str], honor_labels: bool) -> dict[str, str]:
    """https://prometheus.io/docs/prometheus/latest/configuration/configuration/#scrape_config, honor_labels."""
    if honor_labels:
        return {**target, **labels}
    renamed = {f"exported_{name}" if name in target else name: value for name, value in labels.items()}
    return {**renamed, **target}
