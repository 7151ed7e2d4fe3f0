"""transformers' continuous batching (`generate_batch`) as a system of the bench. Called by `engine.command`.

transformers' manager schedules and computes in its own thread. `generate_batch` starts a manager for every call. Here
the manager starts before the first step and stops after the last one, so that no step includes a start or stop. A step
takes as many tokens as a step of our engine, instead of the manager's default of 8,192, because on a CPU a step attends
with a dense mask over all of its tokens. The manager reads the size of the machine's memory from NUMA nodes or with
psutil.
"""

import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from conveyor_bench.comparing.held import in_steps_of_threads
from conveyor_bench.comparing.systems import Prompts, Run

STEP_TOKENS = 1024  # the default of our engine on a CPU
PAGE = 256  # tokens, by the manager's default
NO_TOKEN = -1

logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)  # asks for psutil; errors are in the results


class HfContinuous:
    """A system with the blocks that all requests need, plus half as many for the manager's margin."""

    def __init__(self, model: Path, dtype: str) -> None:
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()

    def start(self, prompts: Prompts, output_tokens: int) -> Run:
        blocks = sum(-(-(len(prompt) + output_tokens) // PAGE) for prompt in prompts)
        config = ContinuousBatchingConfig(
            num_blocks=blocks + (blocks + 1) // 2,
            max_batch_tokens=STEP_TOKENS,
            max_requests_per_batch=len(prompts),
        )
        closing = ExitStack()
        manager = closing.enter_context(
            self.model.continuous_batching_context_manager(
                GenerationConfig(do_sample=False, eos_token_id=NO_TOKEN, pad_token_id=0),
                continuous_batching_config=config,
            )
        )
        return self._run(closing, manager, prompts, output_tokens)

    def _run(self, closing: ExitStack, manager: Any, prompts: Prompts, output_tokens: int) -> Run:
        with closing:
            steps = in_steps_of_threads(self.model, lambda: _generate(manager, prompts, output_tokens))
            while True:
                try:
                    next(steps)
                except StopIteration as stop:
                    outputs: Prompts = stop.value
                    return outputs
                yield _fewest(manager, output_tokens)


def _generate(manager: Any, prompts: Prompts, output_tokens: int) -> Prompts:
    """Return the generated tokens. Raises RuntimeError if a request fails or the manager ends."""
    with manager.pause():  # otherwise the manager begins before it has all prompts
        order = manager.add_requests(prompts, max_new_tokens=output_tokens)
    outputs: dict[str, list[int]] = {}
    while len(outputs) < len(order):
        result = manager.get_result(timeout=1)
        if result is None and not manager.is_running():
            raise RuntimeError("transformers' continuous batching ended before its requests did")
        if result is not None and result.error is not None:
            raise RuntimeError(f"transformers' continuous batching failed: {result.error}")
        if result is not None and result.is_finished():
            outputs[result.request_id] = result.generated_tokens
    return [outputs[request_id] for request_id in order]


def _fewest(manager: Any, output_tokens: int) -> int:
    """Return the fewest tokens that a request has. Call it between two forwards, when the numbers do not change."""
    scheduler = manager.batch_processor.scheduler
    if scheduler.waiting_requests:
        return 0
    return min(
        (len(state.generated_tokens) for state in list(scheduler.active_requests.values())), default=output_tokens
    )
