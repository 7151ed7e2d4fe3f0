"""Whole engines on a GPU give the tokens of transformers' `generate`, and get over what a GPU alone can do to them.

`conveyor_bench gpu` runs them there; its rehearsal runs some of them on the CPU, so that their code is known to work.
"""

import copy
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine import embedding_cores, encoders
from tests.engine.execution import interpreter  # noqa: F401  before the kernels are imported
from tests.engine.loop.test_plain_steps import request_everything
from tests.engine.references import SHARED_PREFIX, Reference, add, answers, run, tokens_of
from tests.engine.tiny_models import KINDS, OTHER_KINDS, VOCAB_SIZE

from conveyor_bench.gpu.gpu_tests import REHEARSES
from conveyor_engine.execution.graphs.cuda import run_again
from conveyor_engine.execution.graphs.mixed import token_sizes
from conveyor_engine.execution.transfer import HostCopy
from conveyor_engine.loop.core import EngineCore
from conveyor_engine.tasks.generate.execution.runner import GenerateRunner

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cpu" and REHEARSES not in os.environ, reason="needs a GPU"),
]

GetReference = Callable[[str], Reference]
ALL_KINDS = pytest.mark.parametrize("kind", KINDS + OTHER_KINDS)
OURS = pytest.mark.parametrize("attention_backend", ["auto", "torch"])  # our layers, transformers' own
GRAPHS = pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
AHEAD = pytest.mark.parametrize("overlap", [True, False], ids=["ahead", "in turn"])


def make_core(ref: Reference, *, overlap: bool = True, **changes: Any) -> EngineCore:
    capture = run_again if DEVICE == "cpu" and not changes.get("enforce_eager") else None
    settings = {"device": DEVICE, "attention_backend": "auto", "overlap": overlap, "capture": capture}
    return ref.make_core(**(settings | changes))


@OURS
@ALL_KINDS
def test_every_kind_gives_the_tokens_of_generate(reference: GetReference, kind: str, attention_backend: str) -> None:
    ref = reference(kind)
    assert answers(make_core(ref, attention_backend=attention_backend), ref.prompts) == ref.answers


@GRAPHS
@AHEAD
@pytest.mark.parametrize("mode", ["none", "static", "dynamic", "continuous"])
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_every_mode_gives_them(
    reference: GetReference, kind: str, mode: str, overlap: bool, enforce_eager: bool
) -> None:
    ref = reference(kind)
    core = make_core(ref, overlap=overlap, batching_mode=mode, enforce_eager=enforce_eager)
    assert answers(core, ref.prompts) == ref.answers


@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_decodes_are_captured_and_every_parameter_gives_the_tokens_that_it_gives_without(
    reference: GetReference, kind: str
) -> None:
    ref, answers = reference(kind), []
    for enforce_eager in (False, True):
        core = make_core(ref, enforce_eager=enforce_eager, max_num_batched_tokens=200)
        assert isinstance(core.executor, GenerateRunner)
        if DEVICE == "cuda":
            graphs = core.executor.graphs
            assert core.executor.graph_sizes == ([] if enforce_eager else [1, 2, 4])
            assert (graphs.sizes("mixed") if graphs else []) == ([] if enforce_eager else token_sizes(200))
        request_everything(core, ref.prompts)
        answers.append({name: (tokens_of(output), output[-1].finish_reason) for name, output in run(core).items()})
    assert answers[0] == answers[1]


@GRAPHS
@AHEAD
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_preempted_requests_give_them(reference: GetReference, kind: str, overlap: bool, enforce_eager: bool) -> None:
    ref = reference(kind)
    core = make_core(ref, overlap=overlap, num_kv_blocks=8, enforce_eager=enforce_eager)
    assert answers(core, ref.prompts) == ref.answers
    assert core.stats().num_preemptions > 0


@AHEAD
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_requests_that_share_a_prefix_give_them(reference: GetReference, kind: str, overlap: bool) -> None:
    ref = reference(kind)
    core = make_core(ref, overlap=overlap, max_num_batched_tokens=512)
    assert answers(core, ref.prompts[4:]) == ref.answers[4:]
    assert core.stats().prefix_cache_hit_tokens == SHARED_PREFIX // 16 * 16


@pytest.mark.parametrize("kind", ["llama"])
def test_an_engine_that_warms_up_and_finds_its_own_memory_gives_them(reference: GetReference, kind: str) -> None:
    ref = reference(kind)
    core = make_core(ref, warmup=True, num_kv_blocks=None, kv_memory_fraction=0.05, max_num_batched_tokens=512)
    assert answers(core, ref.prompts) == ref.answers


@pytest.mark.parametrize("kind", ["llama"])
def test_a_step_without_memory_is_run_again_in_halves(
    reference: GetReference, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = reference(kind)
    core = make_core(ref, enforce_eager=True)
    forward, failed = GenerateRunner._forward, []

    def starve(runner: GenerateRunner, *arguments: Any) -> torch.Tensor:
        if len(failed) < 1:
            failed.append(True)
            torch.empty(2**50, dtype=torch.uint8, device=DEVICE)
        return forward(runner, *arguments)

    monkeypatch.setattr(GenerateRunner, "_forward", starve)
    assert answers(core, ref.prompts) == ref.answers
    assert failed


@pytest.mark.parametrize("kind", ["llama"])
def test_two_engines_share_a_gpu(reference: GetReference, kind: str) -> None:
    ref = reference(kind)
    cores = [make_core(ref) for _ in range(2)]
    answers: list[dict[str, list[int]]] = [{}, {}]
    for number, prompt in enumerate(ref.prompts):
        for core in cores:
            add(core, str(number), prompt)
    while any(core.has_unfinished() for core in cores):
        for core, tokens in zip(cores, answers, strict=True):
            for output in core.step(0.0):
                tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    for tokens in answers:
        assert [tokens[str(number)] for number in range(len(ref.prompts))] == ref.answers


@pytest.mark.parametrize("kind", encoders.KINDS)
def test_models_that_embed_give_the_vectors_of_transformers(kind: str, tmp_path: Path) -> None:
    ref = embedding_cores.Encoder(kind, tmp_path)
    vectors = embedding_cores.answers(ref.make_core(device=DEVICE, overlap=True), embedding_cores.PROMPTS)
    assert embedding_cores.distance(vectors, ref.vectors) < 1e-4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@OURS
@ALL_KINDS
def test_half_precision_is_no_further_from_float32_than_transformers_own(
    reference: GetReference, kind: str, attention_backend: str, dtype: str
) -> None:
    """Log probabilities of the first tokens; transformers' on the same device."""
    if dtype == "float16" and DEVICE == "cpu":
        pytest.skip("the engine refuses float16 on CPUs")
    ref = reference(kind)
    core = make_core(ref, dtype=dtype, attention_backend=attention_backend, max_num_batched_tokens=512)
    half = copy.deepcopy(ref.model).to(DEVICE, getattr(torch, dtype))
    ours, theirs = [], []
    for prompt in ref.prompts:
        add(core, "a", prompt, max_tokens=1, logprobs=VOCAB_SIZE)
        (outputs,) = run(core).values()
        assert len(tokens_of(outputs)) == 1
        (entry,) = outputs[0].logprobs or []
        engine = torch.zeros(VOCAB_SIZE)
        engine[entry.top_token_ids] = torch.tensor(entry.top_logprobs)
        truth, peer = first_logprobs(ref.model, prompt), first_logprobs(half, prompt)
        ours.append(float((engine - truth).abs().mean()))
        theirs.append(float((peer - truth).abs().mean()))
    assert 0 < sum(ours) <= 1.5 * sum(theirs), (ours, theirs)


@pytest.mark.parametrize(("kv_cache_dtype", "least"), [("int8", 0.85), ("fp8", 0.6)])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2"])
def test_an_8_bit_cache_chooses_most_of_the_tokens_of_generate(
    reference: GetReference, kind: str, kv_cache_dtype: str, least: float
) -> None:
    """Each token after those before it as transformers chose them; plain torch over rounded numbers: 0.94, 0.8."""
    if DEVICE == "cpu":
        pytest.skip("8 bits are for the Triton kernels on CUDA")
    if kv_cache_dtype == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU with e4m3")
    ref = reference(kind)
    core = make_core(ref, kv_cache_dtype=kv_cache_dtype, max_num_batched_tokens=512)
    same = 0
    for prompt, answer in zip(ref.prompts, ref.answers, strict=True):
        for number, token in enumerate(answer):
            add(core, "a", prompt + answer[:number], max_tokens=2, ignore_eos=True)
            (outputs,) = run(core).values()
            same += tokens_of(outputs)[0] == token
    assert least <= same / sum(map(len, ref.answers)) <= 1
    if kv_cache_dtype == "int8" and kind == "qwen3":
        agreed = [ours[:5] == theirs[:5] for ours, theirs in zip(answers(core, ref.prompts), ref.answers, strict=True)]
        assert sum(agreed) >= 5, "decodes go on as generate does"


def first_logprobs(model: Any, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([prompt], device=model.device)).logits[0, -1]
    return logits.float().log_softmax(-1).cpu()


def test_waiting_for_a_step_leaves_the_core_to_others() -> None:
    """A pod's CPUs are limited, and a wait that keeps one busy throttles the programs that prepare the next step."""
    tensor = torch.zeros(1, device=DEVICE)
    if DEVICE == "cuda":
        HostCopy(tensor).wait()
        torch.cuda._sleep(2_000_000_000)  # cycles: about a second
    started, used = time.monotonic(), time.thread_time()
    HostCopy(tensor).wait()
    waited, used = time.monotonic() - started, time.thread_time() - used
    assert DEVICE == "cpu" or (waited > 0.3 and used < waited / 2)
