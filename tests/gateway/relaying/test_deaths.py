"""Tests which failures count as deaths of engines with a body, at times that the test chooses."""

import pytest

from conveyor_gateway.relaying.deaths import Deaths

BODY = b'{"prompt": "a", "structured_outputs": {"grammar": "start: deadly"}}'


@pytest.mark.parametrize(
    ("address", "is_silent", "is_refused"),
    [
        pytest.param("10.0.0.1:8000", True, False, id="another connection to a lost node times out"),
        pytest.param("10.0.0.1:8000", False, True, id="the engine has restarted at its address, and dies again"),
        pytest.param("10.0.0.2:8000", True, True, id="another engine falls silent"),
    ],
)
def test_a_body_that_is_sent_again_after_a_death(address: str, is_silent: bool, is_refused: bool) -> None:
    now = 30.0
    deaths = Deaths(lambda: now)
    deaths.note(BODY, "10.0.0.1:8000", sent_at=0.0, is_silent=True)
    now = 61.0
    deaths.note(BODY, address, sent_at=31.0, is_silent=is_silent)
    assert deaths.is_refused(BODY) is is_refused
