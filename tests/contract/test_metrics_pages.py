"""Tests the pages of metrics of all programs."""

import pytest
from prometheus_client import REGISTRY, generate_latest

import conveyor_metrics.app
from conveyor_engine.serving.metrics import EngineMetrics
from conveyor_gateway.recording.metrics import Metrics as GatewayMetrics
from conveyor_operator.metrics import Metrics as OperatorMetrics

PAGES = {
    "engine": EngineMetrics("m").render(),
    "gateway": b"".join(GatewayMetrics().write_page()),
    "metrics server": generate_latest(REGISTRY) if conveyor_metrics.app.REQUESTS else b"",
    "operator": generate_latest(OperatorMetrics().registry),
}


@pytest.mark.parametrize("program", PAGES)
def test_no_page_has_series_about_the_creation_of_series(program: str) -> None:
    """prometheus_client adds one for each counter and histogram, and nobody queries them."""
    assert b"# HELP " in PAGES[program]
    assert b"_created" not in PAGES[program]
