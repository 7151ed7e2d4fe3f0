"""Tests `prompt_logprobs` with graphs whose steps also sample, on a GPU or otherwise in Triton's interpreter."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.engine.execution.interpreter import DEVICE, HAVE_GPU, ON_DEVICE
from tests.engine.references import Reference, add, run, tokens_of

from conveyor_engine import execution
from conveyor_engine.execution import native
from conveyor_engine.execution.attention.triton_backend import TritonPaged
from conveyor_engine.execution.graphs.cuda import run_again
from conveyor_engine.tasks.generate.execution import runner

pytestmark = [pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"), *ON_DEVICE]


@pytest.mark.slow
def test_a_chunk_of_one_token_that_is_scored_keeps_the_prompts_next_token(
    reference: Callable[[str], Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has one logit, like a step that samples. In a graph, its sampled token would replace the prompt's own."""
    monkeypatch.setattr(execution.kernels, "why_missing", lambda device: None)
    monkeypatch.setattr(native, "why_missing", lambda: "not wanted")
    if not HAVE_GPU:
        monkeypatch.setattr(runner, "select_backend", lambda *_: TritonPaged(16))
    ref, changes = reference("llama"), {"attention_backend": "auto", "device": DEVICE.type}
    core = ref.make_core(capture=None if HAVE_GPU else run_again, max_num_seqs=2, max_num_batched_tokens=16, **changes)
    chunks: list[int] = []
    begin = core.executor.begin

    def watch(plan: Any) -> object:
        chunks.extend(t for row, t in zip(plan.rows, plan.num_tokens, strict=True) if row == 0)
        return begin(plan)

    monkeypatch.setattr(core.executor, "begin", watch)
    prompt = ref.prompts[1][:6]
    add(core, "scored", prompt, max_tokens=2, prompt_logprobs=1)
    add(core, "beside", ref.prompts[0], max_tokens=4)
    outputs = run(core)
    scores = [score for output in outputs["scored"] for score in output.prompt_logprobs or []]
    assert 1 in chunks[:-2]
    assert [score.token_id for score in scores] == prompt[1:]
    with torch.inference_mode():
        logits = ref.model(input_ids=torch.tensor([prompt])).logits[0].log_softmax(-1)
    expected = [float(row[token]) for row, token in zip(logits, prompt[1:], strict=False)]
    assert [score.logprob for score in scores] == pytest.approx(expected, abs=1e-3)
    assert tokens_of(outputs["scored"])[0] == int(logits[-1].argmax())
    assert tokens_of(outputs["beside"]) == ref.answers[0][:4]
