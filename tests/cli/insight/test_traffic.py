"""Checks that the metrics pages of engines are read and summed."""

from typing import Any

import pytest
from tests.engine.builders import make_facts

from conveyor_engine.serving.metrics import EngineMetrics
from conveyor_engine.wire.messages import StepOutputs
from conveyor_engine.wire.request import EngineStats
from conveyor_insight.traffic import Histogram, read_traffic


def render(prompts: list[int], **stats: Any) -> str:
    """Return the page of an engine after these prompts, each with an answer of 10 tokens."""
    metrics = EngineMetrics("qwen")
    for tokens in prompts:
        metrics.observe_prompt(tokens, 10)
        metrics.observe_first_token(0.2)
        metrics.observe_next_tokens(0.27, 9)
        metrics.observe_end("length", 10, 0.5, 0.3)
        metrics.observe_stages(0.05, 0.1, 0.3, 0)
    metrics.observe_step(StepOutputs([], EngineStats(num_steps=1, step_num_seqs=4, **stats), 0))
    return metrics.render().decode()


def test_pages_of_engines_are_added_up() -> None:
    closes = {"full": 3, "window": 1}
    pages = [render([100] * 50, num_preemptions=2, batch_close_reasons=closes), render([200] * 150)]
    traffic = read_traffic(pages)
    assert (traffic.engines, traffic.requests, traffic.preemptions) == (2, 200, 2)
    assert traffic.closes == closes
    assert traffic["prompt_tokens"].mean == 175
    assert 128 < traffic["prompt_tokens"].percentile(50) <= 256
    assert traffic["output_tokens"].percentile(95) <= 16
    assert 0.1 < traffic["ttft"].percentile(95) <= 0.25
    assert 0.025 < traffic["itl"].percentile(95) <= 0.05
    assert traffic["latency"].percentile(95) == pytest.approx(0.5, rel=0.1)
    assert traffic["queue"].percentile(95) <= 0.1
    assert traffic["batch_size"].number == 2
    assert traffic.kv_tokens is None


def test_drafts_of_engines_are_added_up() -> None:
    page = render([10], num_draft_tokens=30, num_accepted_tokens=20)
    traffic = read_traffic([page, page])
    assert (traffic.drafts, traffic.accepted_drafts) == (60, 40)


def test_the_cache_of_an_engine_is_read_where_it_has_one() -> None:
    for blocks, tokens in ((64, 1024), (0, None)):
        metrics = EngineMetrics("qwen")
        facts = make_facts(num_kv_blocks=blocks, block_size=16)
        metrics.snapshot.facts = lambda facts=facts: facts
        assert read_traffic([metrics.render().decode()]).kv_tokens == tokens


def test_a_percentile_lies_within_its_bucket() -> None:
    histogram = Histogram()
    histogram.counts.update({1.0: 50, 2.0: 100, float("inf"): 100})
    assert histogram.percentile(50) == 1
    assert histogram.percentile(75) == 1.5
    assert Histogram().percentile(95) == 0
    histogram.counts[float("inf")] = 1000
    assert histogram.percentile(95) == 2, "beyond the last bound nothing is known"


def test_what_is_no_page_is_an_error() -> None:
    with pytest.raises(ValueError):
        read_traffic(["<html>{"])


def test_a_histogram_has_a_limited_number_of_bounds() -> None:
    lines = (f'vllm:time_to_first_token_seconds_bucket{{le="{bound}"}} {bound}' for bound in range(1, 1001))
    assert len(read_traffic(["\n".join(lines)])["ttft"].counts) == 64
