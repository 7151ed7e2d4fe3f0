"""Runs docs/measuring.md's command for the cost of a request in the gateway."""

import json

import pytest
from tests.bench.commands import run


@pytest.mark.slow
def test_every_stream_arrives_whole() -> None:
    sizes = "--seconds 1 --requests-per-second 10 --streams 5 --events 5 --concurrency 2"
    result = json.loads(run("gateway", sizes).splitlines()[-1])
    assert result["streams"]["gateway"]["lost"] == 0
