"""Tests one choice of an answer, without an engine."""

from pathlib import Path

import pytest

from conveyor_engine.serving.metrics import EngineMetrics
from conveyor_engine.tasks.generate.preparing.prepare import PreparedChoice
from conveyor_engine.tasks.generate.serving.choice import Choice
from conveyor_engine.text.parsing.interface import PLAIN_TEXT
from conveyor_engine.text.stop_strings import StopStrings
from conveyor_engine.text.tokenizer import Tokenizer
from conveyor_engine.wire.request import FinishReason, RequestOutput, TokenLogprobs


@pytest.mark.parametrize("tokens_at_a_time", [1, 3, 100])
def test_tokens_are_counted_up_to_the_one_that_completes_a_stop_string(chat_model: Path, tokens_at_a_time: int) -> None:
    """Several tokens may arrive at once, including those that the model generated after the stop string."""
    tokenizer = Tokenizer(chat_model)
    ids = [tokenizer.encode(character, 100)[0] for character in "one END two three"]
    request = PreparedChoice(
        request_id="a", arrival_time=0.0, num_prompt_tokens=1, prompt_tail=[5], max_tokens=100, min_tokens=0
    )
    choice = Choice(0, request, StopStrings(["END"]), tokenizer, EngineMetrics("tiny"), PLAIN_TEXT)
    text = ""
    while choice.finish_reason is None:
        now, ids = ids[:tokens_at_a_time], ids[tokens_at_a_time:]
        end = None if ids else FinishReason.LENGTH
        delta = choice.push(RequestOutput(request_id="a", new_token_ids=now, finish_reason=end))
        text += "".join(text for _, text in delta.parts) if delta is not None else ""
    assert (text, choice.finish_reason, choice.num_tokens) == ("one ", "stop", 7)


def test_an_answer_that_the_engine_ended_at_a_stop_string_is_cut_there(chat_model: Path) -> None:
    """Unlike an end-of-sequence token, the last token is text: a part of the stop string, and perhaps of the answer."""
    tokenizer = Tokenizer(chat_model)
    ids = [tokenizer.encode(character, 100)[0] for character in "one END"]
    request = PreparedChoice(
        request_id="a", arrival_time=0.0, num_prompt_tokens=1, prompt_tail=[5], max_tokens=100, min_tokens=0
    )
    choice = Choice(0, request, StopStrings(["END"]), tokenizer, EngineMetrics("tiny"), PLAIN_TEXT)
    delta = choice.push(RequestOutput(request_id="a", new_token_ids=ids, finish_reason=FinishReason.STOP_STRING))
    assert delta is not None
    assert (delta.parts[0][1], choice.finish_reason, choice.num_tokens) == ("one ", "stop", 7)


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.STOP_STRING])
def test_an_end_token_has_log_probabilities_but_not_behind_a_stop_string(
    chat_model: Path, reason: FinishReason
) -> None:
    tokenizer = Tokenizer(chat_model)
    ids = [tokenizer.encode(character, 100)[0] for character in "oneEND"] + [0]
    request = PreparedChoice(
        request_id="a", arrival_time=0.0, num_prompt_tokens=1, prompt_tail=[5], max_tokens=100, min_tokens=0
    )
    stop = StopStrings(["END"] if reason is FinishReason.STOP_STRING else [])
    choice = Choice(0, request, stop, tokenizer, EngineMetrics("tiny"), PLAIN_TEXT)
    logprobs = [TokenLogprobs.of(token_id, -1.0, [], []) for token_id in ids]
    delta = choice.push(
        RequestOutput(request_id="a", new_token_ids=ids, logprobs=logprobs, finish_reason=FinishReason.STOP)
    )
    assert delta is not None
    shown = ids if reason is FinishReason.STOP else ids[:3]
    assert [token.logprobs.token_id for token in delta.tokens] == shown
    assert delta.tokens[-1].start == (6 if reason is FinishReason.STOP else 2)
