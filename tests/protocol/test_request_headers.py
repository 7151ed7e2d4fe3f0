"""What the headers of a request say: its id, its time and its level."""

import pytest

from conveyor_protocol.request_headers import choose_request_id, parse_level, parse_timeout_seconds


@pytest.mark.parametrize("given", ["a", "!~", "x" * 128, "req_1.2-3"])
def test_an_id_that_can_be_logged_stays(given: str) -> None:
    assert choose_request_id(given) == given


@pytest.mark.parametrize("given", ["", "x" * 129, "a b", "a\n", "\x7f", "ä", "\x00"])
def test_another_one_is_replaced(given: str) -> None:
    assert len(choose_request_id(given)) == 32
    assert choose_request_id(given) != choose_request_id(given)


@pytest.mark.parametrize(("text", "seconds"), [("1", 1.0), ("0.001", 0.001), ("1e3", 1000.0), (" 5 ", 5.0)])
def test_a_time_is_a_number_of_seconds(text: str, seconds: float) -> None:
    assert parse_timeout_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "-1", "nan", "inf", "soon", "1s", "5e-324", "0.0009"])
def test_any_other_is_refused_with_what_it_must_be(text: str) -> None:
    with pytest.raises(
        ValueError, match=r"X-Request-Timeout-Seconds must be a number of seconds, at least 0\.001, not"
    ):
        parse_timeout_seconds(text)


def test_a_refusal_quotes_only_the_beginning_of_what_a_client_sends() -> None:
    with pytest.raises(ValueError, match=r"^.{0,180}$"):
        parse_timeout_seconds("x" * 10_000)


@pytest.mark.parametrize(("text", "level"), [("0", 0), ("7", 7), ("1000", 1000)])
def test_a_level_is_a_whole_number(text: str, level: int) -> None:
    assert parse_level(text) == level


@pytest.mark.parametrize("text", ["", "-1", "1001", "1.0", "٣", "1\n", "best", "9" * 10_000])
def test_any_other_level_is_refused_with_what_it_must_be(text: str) -> None:
    with pytest.raises(ValueError, match=r"^X-Request-Level must be a whole number from 0 to 1000, not .{0,110}$"):
        parse_level(text)
