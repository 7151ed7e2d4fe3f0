"""Tests Kopf's connection when the API server refuses its credentials."""

import logging

import pytest
from tests.operator.stage import Stage, wait_until

from conveyor_operator.kinds import POD


def test_credentials_that_are_refused_for_a_moment_do_not_end_the_operator(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    """An API server without its database refuses valid tokens."""
    with stage.operator(), caplog.at_level(logging.WARNING, "conveyor_operator.loop.session"):
        stage.space.make_service()
        stage.space.wait_children("qwen")
        stage.proxy.wait_quiet()
        refused = stage.proxy.fail(lambda call: (call.verb, call.resource) == ("watch", POD.plural), 401, times=2)
        stage.proxy.sever()
        stage.proxy.severed = False
        wait_until("it was refused twice", lambda: refused.hits == 2)
        stage.space.delete("PodDisruptionBudget", "qwen-engine")
        wait_until("it is back", lambda: stage.space.get("PodDisruptionBudget", "qwen-engine"))
        stage.proxy.wait_quiet(2)
    assert "event=credentials_refused" in caplog.text
