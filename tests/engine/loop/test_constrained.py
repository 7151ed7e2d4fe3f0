"""Tests that constrained requests get transformers' tokens under the same constraint, however the steps run."""

from collections.abc import Callable

import pytest
import torch
from tests.engine.pretended_constraints import SumModThree
from tests.engine.references import MAX_TOKENS, Reference, add, run, tokens_of
from tests.engine.tiny_models import VOCAB_SIZE, greedy

from conveyor_engine.execution.graphs.cuda import Capture, run_again
from conveyor_engine.wire.request import EngineRequest

GetReference = Callable[[str], Reference]


class SmallSumModThree(SumModThree):
    """The constraint for the tiny model's vocabulary."""

    num_tokens = VOCAB_SIZE


def constrain_odd_names(request: EngineRequest) -> SumModThree | None:
    return SmallSumModThree() if int(request.request_id) % 2 else None


def generate_constrained(ref: Reference, prompt: list[int]) -> list[int]:
    """Return transformers' greedy answer under `SumModThree`."""

    def allow(_: int, token_ids: torch.Tensor) -> list[int]:
        given = int(token_ids[len(prompt) :].sum())
        return [token_id for token_id in range(VOCAB_SIZE) if token_id % 3 == given % 3]

    return greedy(ref.model, prompt, MAX_TOKENS, prefix_allowed_tokens_fn=allow)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("capture", [None, run_again], ids=["eager", "captured"])
@pytest.mark.parametrize("mode", ["continuous", pytest.param("static", marks=pytest.mark.slow)])
def test_constrained_requests_get_the_tokens_of_transformers(
    reference: GetReference, overlap: bool, capture: Capture | None, mode: str
) -> None:
    ref = reference("llama")
    core = ref.make_core(overlap=overlap, capture=capture, attention_backend="native", batching_mode=mode)
    core.scheduler._constrain = constrain_odd_names
    for number, prompt in enumerate(ref.prompts):
        add(core, str(number), prompt)
    outputs = run(core)
    for number, prompt in enumerate(ref.prompts):
        expected = generate_constrained(ref, prompt) if number % 2 else ref.answers[number]
        assert tokens_of(outputs[str(number)]) == expected
