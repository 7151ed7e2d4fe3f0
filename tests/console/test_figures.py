"""Tests the figures that follow from two reads of an engine's metrics."""

import pytest

from conveyor_console.figures import EngineFigures, Figures


def page(tokens: int = 0, fast: int = 0, slow: int = 0, usage: float = 0.25) -> str:
    """Return metrics with this many first tokens within 0.1 s and within 1 s."""
    name = "vllm:time_to_first_token_seconds"
    return "\n".join(
        (
            f'{name}_bucket{{le="0.1"}} {fast}',
            f'{name}_bucket{{le="1.0"}} {fast + slow}',
            f'{name}_bucket{{le="+Inf"}} {fast + slow}',
            f"{name}_sum 1.0",
            f"vllm:generation_tokens_total {tokens}",
            f"vllm:kv_cache_usage_perc {usage}",
        )
    )


def test_the_first_read_has_no_rates() -> None:
    figures = EngineFigures()
    figures.add({"a": page(tokens=1000, fast=1000)}, 0)
    assert figures.figures == Figures(kv_usage=0.25)


def test_percentiles_and_rates_are_those_of_the_last_half_minute_to_minute() -> None:
    figures = EngineFigures()
    for now, slow in ((0, 1000), (5, 1000), (30, 1000), (35, 1000), (60, 1000), (65, 1000)):
        figures.add({"a": page(tokens=10 * now, fast=now, slow=slow)}, now)
    assert figures.figures.first_token_seconds == pytest.approx(0.095), "the slow ones were before"
    assert figures.figures.tokens_per_second == pytest.approx(10)
    figures.add({"a": page(tokens=700, fast=70, slow=1100)}, 70)
    assert figures.figures.first_token_seconds is not None
    assert figures.figures.first_token_seconds > 0.9


def test_engines_are_added_up_and_the_fullest_cache_counts() -> None:
    figures = EngineFigures()
    figures.add({"a": page(), "b": page()}, 0)
    figures.add({"a": page(tokens=100, usage=0.5), "b": page(tokens=50, usage=0.75)}, 10)
    assert figures.figures.tokens_per_second == pytest.approx(15)
    assert figures.figures.kv_usage == 0.75


def test_an_engine_that_has_restarted_counts_from_its_next_read_on() -> None:
    figures = EngineFigures()
    figures.add({"a": page(tokens=1000, fast=100)}, 0)
    figures.add({"a": page(tokens=10, fast=1)}, 10)
    assert figures.figures == Figures(kv_usage=0.25)
    figures.add({"a": page(tokens=110, fast=2)}, 20)
    assert figures.figures.tokens_per_second == pytest.approx(10)


@pytest.mark.parametrize("text", ["no metrics", "vllm:kv_cache_usage_perc NaN", "vllm:generation_tokens_total 1e999"])
def test_pages_of_hostile_engines_are_left_out(text: str) -> None:
    figures = EngineFigures()
    for now in (0, 10):
        figures.add({"a": page(tokens=now), "b": text}, now)
    assert figures.figures.tokens_per_second == pytest.approx(1)
    assert figures.figures.kv_usage == 0.25


def test_values_that_no_engine_can_have_are_left_out() -> None:
    figures, name = EngineFigures(), "vllm:time_to_first_token_seconds_bucket"
    for value in ("0", "1e308"):
        hostile = f'{name}{{le="0.1"}} {value}\n{name}{{le="+Inf"}} {value}\nvllm:generation_tokens_total {value}'
        figures.add({"b": hostile, "c": hostile}, float(value) / 1e307)
    assert figures.figures == Figures(tokens_per_second=0.0)
    figures.add({"d": "vllm:kv_cache_usage_perc -1"}, 20)
    assert figures.figures.kv_usage is None


def test_an_engine_without_tokens_that_has_restarted_counts_from_its_next_read_on() -> None:
    figures = EngineFigures()
    figures.add({"a": page(slow=100)}, 0)
    figures.add({"a": page(fast=3)}, 10)
    assert figures.figures.first_token_seconds is None
    figures.add({"a": page(fast=103)}, 20)
    assert figures.figures.first_token_seconds == pytest.approx(0.095)
