"""Every kind of model gives the tokens of transformers' `generate`, whatever computes its layers."""

from collections.abc import Callable

import pytest
import torch
from tests.engine.references import Reference, add, answers, run
from tests.engine.tiny_models import KINDS, OTHER_KINDS, VOCAB_SIZE

from conveyor_engine.execution import native

GetReference = Callable[[str], Reference]
ALL_KINDS = pytest.mark.parametrize(
    "kind", [*KINDS, *(pytest.param(kind, marks=pytest.mark.slow) for kind in OTHER_KINDS)]
)
NEAR_TIES = ("granitemoehybrid",)  # a prompt whose experts are chosen otherwise after another rounding


@pytest.fixture(params=["transformers", "native", "torch"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """transformers' layers; ours with the compiled kernels; ours with torch's operations, as on a GPU.

    Returns the name of the attention backend that has such layers.
    """
    if request.param == "torch":
        monkeypatch.setattr(native, "why_missing", lambda: "not wanted")
    elif request.param == "native" and (reason := native.why_missing()):
        pytest.skip(f"needs the compiled kernels: {reason}")
    return "torch" if request.param == "transformers" else "auto"


@ALL_KINDS
def test_greedy_answers_are_those_of_generate(reference: GetReference, kind: str, backend: str) -> None:
    ref = reference(kind)
    assert len({token for answer in ref.answers for token in answer}) >= 20
    assert answers(ref.make_core(attention_backend=backend), ref.prompts) == ref.answers


@ALL_KINDS
def test_bfloat16_is_no_further_from_float32_than_transformers_own(
    reference: GetReference, kind: str, backend: str
) -> None:
    """Compares log probabilities of the first tokens.

    Two right computations in bfloat16 differ; a wrong one differs more. Without its worst prompt for `NEAR_TIES`.
    """
    ref = reference(kind)
    core = ref.make_core(dtype="bfloat16", attention_backend=backend, max_num_batched_tokens=512)
    ours, theirs = [], []
    for prompt, truth, peer in zip(ref.prompts, *ref.first_log_probs.values(), strict=True):
        add(core, "a", prompt, max_tokens=1, logprobs=VOCAB_SIZE)
        (entry,) = run(core)["a"][0].logprobs or []
        engine = torch.zeros(VOCAB_SIZE)
        engine[entry.top_token_ids] = torch.tensor(entry.top_logprobs)
        ours.append(float((engine - truth).abs().mean()))
        theirs.append(float((peer - truth).abs().mean()))
    if kind in NEAR_TIES:
        ours, theirs = sorted(ours)[:-1], sorted(theirs)[:-1]
    assert 0 < sum(ours) <= 1.5 * sum(theirs), (ours, theirs)
