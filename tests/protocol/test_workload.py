"""The sizes that follow from the lengths of requests."""

import math
from random import Random

import pytest

from conveyor_load.traces import Lengths as Drawn
from conveyor_protocol.workload import Lengths, Workload

CHAT = Workload(Lengths(256, 1024), Lengths(128, 512))


def test_mean_and_longest_are_those_of_the_lengths_that_tune_draws() -> None:
    random, lengths = Random(1), Lengths(256, 1024)
    drawn = [Drawn(*lengths).draw(random) for _ in range(200_000)]
    assert lengths.mean == pytest.approx(sum(drawn) / len(drawn), rel=0.02)
    assert sum(each > lengths.longest for each in drawn) == pytest.approx(20, abs=15), "1 of 10,000"


def test_equal_percentiles_are_one_length() -> None:
    exact = Workload(Lengths(100, 100))
    assert (exact.mean_tokens, exact.short_tokens, exact.long_tokens, exact.longest_tokens) == (100, 100, 100, 128)


def test_the_widest_lengths_stay_within_their_bounds() -> None:
    widest = Workload(Lengths(1, 16_777_216), Lengths(1, 16_777_216))
    assert widest.longest_tokens == 16_777_216
    assert widest.mean_tokens <= widest.long_tokens
    assert widest.count_held(1) == 1


def test_the_context_is_a_power_of_two_within_the_model_and_the_cache() -> None:
    assert math.log2(CHAT.longest_tokens).is_integer()
    assert CHAT.longest_tokens == 16_384
    assert CHAT.choose_context(None, None) == 16_384
    assert CHAT.choose_context(8192, None) == 8192
    assert CHAT.choose_context(8192, 2048) == 2048


def test_blocks_hold_a_batch_of_long_requests_or_one_of_the_whole_context() -> None:
    assert CHAT.count_blocks(32, 16, 8192) == 32 * 1536 // 16
    assert CHAT.count_blocks(1, 16, 8192) == 8192 // 16


def test_graphs_end_where_short_requests_do_not_fit_and_are_not_needed_for_one_token() -> None:
    assert CHAT.find_largest_graph(32, None) == 32
    assert CHAT.find_largest_graph(32, 3840) == 10
    assert CHAT.find_largest_graph(32, 16) == 1
    assert Workload(Lengths(256, 1024)).find_largest_graph(32, None) == 0
    assert Workload(Lengths(256, 1024), Lengths(1, 1)).find_largest_graph(32, None) == 0


def test_the_warm_up_has_a_step_of_usual_prompts_and_a_long_one() -> None:
    assert CHAT.list_warm_up(32, 1024) == [(4, 256), (1, 1024)]
    assert CHAT.list_warm_up(2, 8192) == [(2, 256), (1, 1024)]
    assert CHAT.list_warm_up(32, 100) == [(1, 256), (1, 1024)]


def test_sizes_of_an_hour_of_chats_refuse_the_documents_of_the_next() -> None:
    """Why observed lengths are no default (docs/adr/0090-sizes-follow-the-workload.md)."""
    random = Random(0)
    inputs, outputs = Drawn(2048, 8192), Drawn(256, 1024)
    documents = [inputs.draw(random) + outputs.draw(random) for _ in range(20_000)]
    chats = Workload(Lengths(64, 256), Lengths(128, 512))
    context = chats.choose_context(40_960, None)
    refused = sum(each > context for each in documents) / len(documents)
    held = chats.count_blocks(32, 16, context) * 16 / (sum(documents) / len(documents))
    assert (context, round(refused, 2), round(held)) == (8192, 0.06, 7), "of 32 that a batch has"
