"""Quantities and durations mean here what they mean to Kubernetes."""

from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conveyor_api.quantities import format_quantity, is_zero, parse_duration_seconds, parse_quantity


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (3, "3"),
        ("0", "0"),
        ("500m", "0.5"),
        ("100u", "0.0001"),
        ("1n", "0.000000001"),
        (".5", "0.5"),
        ("2k", "2000"),
        ("1M", "1000000"),
        ("1E", "1000000000000000000"),
        ("1Ki", "1024"),
        ("10Gi", "10737418240"),
        ("1.5Gi", "1610612736"),
        ("1Ei", "1152921504606846976"),
        ("1e3", "1000"),
        ("1E3", "1000"),
        ("-2", "-2"),
        ("1e100", "1e100"),
        ("1e1000", "1e100"),
        ("1e00000002", "100"),
        ("1E-99999999999999999999", "1e-100"),
    ],
)
def test_a_quantity_is_a_number(text: int | str, number: str) -> None:
    assert parse_quantity(text) == Decimal(number)


@pytest.mark.parametrize("text", ["", "1 Gi", "Gi", "1GB", "1ki", "1K", "1.2.3", "1e", "0x1", "١", "1\n"])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity"):
        parse_quantity(text)


@settings(deadline=None)
@given(st.integers(min_value=0, max_value=10**9))
def test_a_formatted_quantity_reads_back_in_thousandths(milli: int) -> None:
    assert parse_quantity(format_quantity(milli / 1000)) == Decimal(milli) / 1000


def test_a_whole_quantity_has_no_unit() -> None:
    assert [format_quantity(26.0), format_quantity(25.6), format_quantity(0)] == ["26", "25600m", "0"]


@pytest.mark.parametrize(("text", "seconds"), [("10ms", 0.01), ("2s", 2), ("1m30s", 90), ("1h", 3600), ("0s", 0)])
def test_a_duration_is_seconds(text: str, seconds: float) -> None:
    assert parse_duration_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "10", "1.5s", "s", "1 s", "PT1S", "-1s", "1d", "1s\n", "1234567s"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        parse_duration_seconds(text)


def test_zero_is_a_count_or_a_share_of_nothing() -> None:
    assert is_zero(0)
    assert is_zero("0%")
    assert not is_zero(1)
    assert not is_zero("10%")
