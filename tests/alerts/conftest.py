"""Runs the programs whose metrics the alerts and the dashboard use: gateway, operator and metrics server."""

from tests.contract.conftest import gateway, space, stage
from tests.metrics.conftest import aggregated, metrics_plane, own_address, start_gateway

__all__ = ["aggregated", "gateway", "metrics_plane", "own_address", "space", "stage", "start_gateway"]
