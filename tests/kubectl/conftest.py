"""A control plane of its own whose HorizontalPodAutoscalers read the real metrics server, and gateways for that."""

from tests.contract.conftest import nowhere
from tests.metrics.conftest import aggregated, metrics_plane, own_address, start_gateway

__all__ = ["aggregated", "metrics_plane", "nowhere", "own_address", "start_gateway"]
