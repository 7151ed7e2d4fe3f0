"""Counts the function calls of a step in the scheduler, which do not depend on the machine."""

import gc
import sys
from collections import Counter
from types import FrameType

from tests.engine.builders import make_request, make_scheduler

from conveyor_engine.wire.step import StepResult

# Raise these numbers only for work that each model needs. What a model does not use (windows, states, images, masks)
# is decided once for all rows of a step.
CALLS_PER_DECODE = 48
CALLS_PER_PROMPT_BLOCK = 9
BLOCK_SIZE = 4


def count_calls(num_rows: int, prompt: int, *, decodes: bool) -> Counter[str]:
    """Return the calls of a step in which all rows compute their prompts, or of the one after it, by name."""
    scheduler = make_scheduler(
        max_num_seqs=num_rows, num_kv_blocks=1000, max_model_len=200, max_num_batched_tokens=2000, block_size=BLOCK_SIZE
    )
    for number in range(num_rows):
        prompt_token_ids = [number, *range(prompt - 1)]
        scheduler.add_request(make_request(str(number), prompt_token_ids, max_tokens=9, ignore_eos=True))
    calls: Counter[str] = Counter()
    gc.disable()  # what is freed in a step may be of other tests

    def count(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            calls[frame.f_code.co_qualname] += 1
        elif event == "c_call":
            calls[getattr(argument, "__name__", "")] += 1

    for is_decode in (False, True):
        if is_decode == decodes:
            sys.setprofile(count)
        plan = scheduler.schedule(0.0)
        assert plan is not None
        assert plan.num_decodes == num_rows * is_decode
        scheduler.update(StepResult(plan.number, [[5]] * num_rows))
        scheduler.take_outputs()
        if is_decode == decodes:
            sys.setprofile(None)
    gc.enable()
    return calls


def test_a_row_that_decodes_costs_a_bounded_number_of_calls() -> None:
    few, many = (count_calls(num_rows, prompt=9, decodes=True) for num_rows in (10, 20))
    per_row = (many - few).total() / 10
    assert 20 < per_row <= CALLS_PER_DECODE, (many - few).most_common()


def test_a_block_of_a_prompt_costs_a_bounded_number_of_calls() -> None:
    few, many = (count_calls(10, prompt, decodes=False) for prompt in (41, 81))
    per_block = (many - few).total() / 10 / (40 // BLOCK_SIZE)
    assert 3 < per_block <= CALLS_PER_PROMPT_BLOCK, (many - few).most_common()


def test_windowed_tables_are_not_called_for_a_model_without_them() -> None:
    for decodes in (False, True):
        calls = count_calls(10, prompt=41, decodes=decodes)
        assert not [name for name in calls if "WindowBlocks." in name and "__init__" not in name]
