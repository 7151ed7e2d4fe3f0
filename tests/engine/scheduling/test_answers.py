"""Tests a request's outputs: its tokens, its end, and the expected time of answers."""

from tests.engine.builders import EOS, make_request, make_scheduler, run_all, run_step

from conveyor_engine.wire.request import FinishReason


def test_an_end_of_sequence_token_stops_and_is_part_of_the_answer() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a"))
    output = run_step(scheduler, token_id=EOS)["a"]
    assert (output.finish_reason, output.new_token_ids) == (FinishReason.STOP, [EOS])


def test_ignore_eos_goes_on_and_stop_token_ids_still_stop() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", ignore_eos=True, stop_token_ids=(9,)))
    assert run_step(scheduler, token_id=EOS)["a"].finish_reason is None
    assert run_step(scheduler, token_id=9)["a"].finish_reason == FinishReason.STOP


def test_logits_that_are_not_finite_end_the_request_with_an_error() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a"))
    output = run_step(scheduler, token_id=-1)["a"]
    assert output.finish_reason == FinishReason.ERROR
    assert "not finite" in (output.message or "")


def test_the_expected_length_of_an_answer_follows_those_that_were_given() -> None:
    scheduler = make_scheduler("dynamic", num_kv_blocks=1024, max_model_len=1024, batching_window_seconds=0.0)
    for number in range(200):
        scheduler.add_request(make_request(str(number), 4, max_tokens=8))
        run_all(scheduler, now=100.0)
    scheduler.add_request(make_request("chat", 4, max_tokens=1000))
    assert scheduler.requests["chat"].expected_total_tokens == 4 + 8
