"""Runs the programs whose metrics the alerts use: gateway, operator and metrics server."""

from tests.contract.conftest import gateway, space, stage
from tests.metrics.conftest import aggregated, metrics_plane

__all__ = ["aggregated", "gateway", "metrics_plane", "space", "stage"]
