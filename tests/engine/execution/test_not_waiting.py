"""Checks that a whole step is launched on a GPU without reading a number, which would wait for all of its work.

The GPU is simulated by torch's fake tensors. They have shapes but no numbers, so reading a number raises an error.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy.typing as npt
import pytest
import torch
from tests.engine.dual_models import KINDS as DUAL_KINDS
from tests.engine.dual_models import build_dual_model
from tests.engine.execution import interpreter  # noqa: F401  before the kernels are imported
from tests.engine.image_models import KINDS, SIDE, build_image_model
from tests.engine.speech_models import build_speech_model
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode, unset_fake_temporarily
from transformers import PreTrainedModel

from conveyor_engine.execution import batch, rows
from conveyor_engine.execution.attention.backend import AttentionSpec
from conveyor_engine.execution.attention.interface import Paged, PagedStep, residual_of
from conveyor_engine.execution.attention.packed import Packed
from conveyor_engine.execution.attention.torch_paged import TorchPaged
from conveyor_engine.execution.batch import build_batch, only_sampled
from conveyor_engine.execution.graphs import decodes, mixed
from conveyor_engine.execution.graphs.cuda import run_again
from conveyor_engine.execution.graphs.decodes import DecodeSteps
from conveyor_engine.execution.graphs.mixed import MixedSteps
from conveyor_engine.execution.graphs.step_graphs import StepGraphs
from conveyor_engine.execution.kernels import sample
from conveyor_engine.execution.models import adapters
from conveyor_engine.execution.models.adapters import AdaptedLinear, Adapters
from conveyor_engine.execution.rows import Rows
from conveyor_engine.execution.runners import packed
from conveyor_engine.execution.sampling import (
    logit_processors,
    logprobs,
    penalties,
    processor,
    row_values,
    sampler,
)
from conveyor_engine.execution.sampling.sampler import Sampler
from conveyor_engine.tasks.embed.execution import image_runner as dual
from conveyor_engine.tasks.embed.execution import pooling
from conveyor_engine.tasks.embed.execution.files import PoolingMode
from conveyor_engine.tasks.embed.execution.pooling import pool
from conveyor_engine.tasks.imageclassify.execution import ImageClassifyRunner
from conveyor_engine.tasks.transcribe.execution import model as speech
from conveyor_engine.tasks.transcribe.execution import runner as speech_runner
from conveyor_engine.tasks.transcribe.execution.model import Tokens, TranscriptRules
from conveyor_engine.tasks.transcribe.execution.runner import SpeechRunner
from conveyor_engine.tasks.transcribe.execution.whisper import Decoder, Encoder
from conveyor_engine.tasks.transcribe.facts import AudioFacts, Window
from conveyor_engine.wire.request import SamplingParams
from conveyor_engine.wire.step import AdmittedRow, RowSampling, StepPlan

CUDA = torch.device("cuda")
VOCAB_SIZE, BLOCK_SIZE = 1000, 4


@pytest.fixture(autouse=True)
def no_numbers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fake tensors support no pinned memory, and small ones would keep the numbers that they are made from.

    The kernels that sample are not launched.
    """

    def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
        return torch.empty(array.shape, dtype=torch.from_numpy(array).dtype, device=device)

    monkeypatch.setattr(row_values, "copy_into", lambda *_: None)
    of_sampling = (logit_processors, logprobs, penalties, processor, row_values, sampler)
    for module in (adapters, batch, packed, pooling, rows, speech, speech_runner, *of_sampling):
        monkeypatch.setattr(module, "to_device", to_device)
    monkeypatch.setattr(type(sample._choose), "run", lambda *_, **__: None)
    with FakeTensorMode(), torch.inference_mode():
        yield


def run_step(*rows: dict[str, Any]) -> None:
    """Run prompts of three tokens, which are admitted and get their first token, and a chunk that samples none."""
    state = Rows(8, 32, BLOCK_SIZE, CUDA)
    chooser = Sampler(8, VOCAB_SIZE, CUDA, state.token_ids)
    sampling = [RowSampling(SamplingParams(**params), 5, 3 + params.get("min_tokens", 0), (1, 2)) for params in rows]
    admitted = [AdmittedRow.of(row, [1, 2, 3], [row], how) for row, how in enumerate(sampling)]
    count = len(rows)
    plan = StepPlan(
        number=0,
        admitted=admitted,
        new_blocks=[(count, [9])],
        rows=list(range(count + 1)),
        num_computed_tokens=[0] * (count + 1),
        num_tokens=[3] * count + [2],
        num_logits=[1] * count + [0],
        num_decodes=0,
    )
    state.update(plan)
    for row in admitted:
        chooser.set_row(row.row, row.sampling)  # type: ignore[arg-type]
    built = build_batch(plan, state, BLOCK_SIZE)
    paged = PagedStep(TorchPaged(), built.metadata, only_sampled(2, built, state))
    hidden_states = torch.empty((1, built.metadata.num_tokens, 8), device=CUDA)
    assert residual_of(paged, AttentionSpec(2, 1.0, None, None), hidden_states).shape == (1, count, 8)
    sampled = chooser.sample(torch.empty((count, VOCAB_SIZE), device=CUDA), built.samples)
    state.append(built.samples.device_rows, built.samples.device_positions, sampled.token_ids)


def test_a_step_is_given_without_waiting() -> None:
    run_step(
        {"temperature": 0.0}, {}, {"temperature": 0.7, "logprobs": 2}, {"min_tokens": 3}, {"top_k": 20, "top_p": 0.8}
    )
    run_step(
        {"presence_penalty": 1.0}, {"repetition_penalty": 1.5}, {"logit_bias": ((1, 2.0),)}, {"min_p": 0.1},
        {"allowed_token_ids": (1, 2)}, {"bad_words": ((1,), (2, 3))},
    )  # fmt: skip


def test_steps_are_captured_and_given_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def copy_into(tensor: torch.Tensor, array: npt.NDArray[Any]) -> None:
        tensor.copy_(torch.empty(array.shape, dtype=torch.int64, device=CUDA))

    def forward(
        input_ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor | int, paged: Paged
    ) -> torch.Tensor:
        assert isinstance(paged, PagedStep)
        assert paged.metadata.block_tables.shape == (paged.metadata.num_seqs, 8)
        kept = positions.T if isinstance(keep, int) else positions.T[keep]
        return torch.empty((len(kept), VOCAB_SIZE), device=CUDA) + kept

    for module in (decodes, mixed):
        monkeypatch.setattr(module, "copy_into", copy_into)
    state = Rows(9, 32, BLOCK_SIZE, CUDA)
    how = (state, TorchPaged(), forward)  # a backend that is not called
    chooser = Sampler(9, VOCAB_SIZE, CUDA, state.token_ids)
    graphs = StepGraphs([DecodeSteps(*how), MixedSteps(*how, 32)], state, chooser)
    graphs.capture(run_again, lambda _: None)
    assert (graphs.sizes("decodes"), graphs.sizes("mixed")) == ([1, 2, 4, 8], [16, 32])
    of_decodes = StepPlan(0, [], [], [3, 0, 5], [4, 5, 6], [1] * 3, [1] * 3, 3)
    with_prompts = StepPlan(0, [], [], [3, 0, 5, 1], [4, 5, 0, 6], [1, 1, 20, 2], [1, 1, 0, 1], 2)
    for plan in (of_decodes, with_prompts):
        logits, samples, found = graphs.run(plan) or pytest.fail("none")
        assert (logits.shape, samples.device_positions.shape) == ((3, VOCAB_SIZE), (3,))
        assert found is not None
        assert (found.best.shape, found.tokens.shape) == ((3,), (3,))


@pytest.mark.parametrize("cut", [{"top_k": 257}, {"top_p": 0.9}])
def test_cuts_without_a_small_top_k_wait_where_their_kernel_cannot_run(
    cut: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_step({}, cut)
    monkeypatch.setattr(sampler, "_find_cut", lambda _: None)
    with pytest.raises(DataDependentOutputException):
        run_step({}, cut)


@pytest.mark.parametrize("mode", ["cls", "last", "mean"])
def test_vectors_are_pooled_without_waiting(mode: PoolingMode) -> None:
    assert pool(torch.empty((10, 8), device=CUDA), [0, 4, 10], mode).shape == (2, 8)


def pretend(build: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """Return a model with fake weights. Real ones are made first, because making them reads numbers."""
    with unset_fake_temporarily():
        model = build()
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            pretended = torch.empty(weight.shape, dtype=weight.dtype, device=CUDA)
            setattr(module, name, torch.nn.Parameter(pretended, requires_grad=False))
        for name, values in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.empty(values.shape, dtype=values.dtype, device=CUDA))
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_images_are_classified_without_waiting(kind: str) -> None:
    runner = object.__new__(ImageClassifyRunner)
    runner.model = pretend(lambda: build_image_model(kind))
    logits = runner._forward(torch.empty((5, 3, SIDE, SIDE), device=CUDA))
    assert (logits.shape, logits.device.type, logits.dtype) == ((5, 3), "cuda", torch.float32)


def test_a_model_that_reads_a_number_from_the_device_is_detected() -> None:
    runner = object.__new__(ImageClassifyRunner)
    runner.model = pretend(lambda: build_image_model("vit"))
    runner.model.register_forward_hook(lambda _, __, output: output.logits.sum().item())
    with pytest.raises(DataDependentOutputException):
        runner._forward(torch.empty((5, 3, SIDE, SIDE), device=CUDA))


@pytest.mark.slow
@pytest.mark.parametrize("kind", DUAL_KINDS)
def test_images_and_texts_are_embedded_without_waiting(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        dual, "to_device", lambda array, device: torch.empty(array.shape, dtype=torch.int64, device=CUDA)
    )
    runner = object.__new__(dual.DualRunner)
    runner.model = pretend(lambda: build_dual_model(kind))
    runner.device, runner._padded_tokens, runner._pad_token = CUDA, 24 if kind == "siglip" else 0, 1
    vectors = runner._embed_pictures(torch.empty((5, 3, SIDE, SIDE), device=CUDA))
    assert (vectors.shape[0], vectors.device.type, vectors.dtype) == (5, "cuda", torch.float32)
    assert runner._embed_texts([[1, 2, 3], [4]]).shape == (2, vectors.shape[1])


@pytest.mark.slow
def test_tokens_of_speech_are_chosen_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two windows begin, one of which asks for its language, while another one goes on."""
    facts = AudioFacts(
        num_mels=80, window_seconds=6, window_frames=600, frames_per_position=2, window_cost=304,
        languages={"en": 300}, tasks={}, start=299, previous=None, end=298, first_timestamp=310, max_tokens=64,
    )  # fmt: skip
    runner = object.__new__(SpeechRunner)
    runner.model, runner.device, runner._dtype = pretend(build_speech_model), CUDA, torch.float32
    runner._block_size = 16
    runner._of_task, runner._backend = facts, TorchPaged()
    runner._encoder = Encoder(runner.model, Packed)
    runner._decoder = Decoder(runner.model, runner._backend)
    runner._backend.allocate(runner._decoder.shapes, 80, 16, torch.float32, CUDA)
    runner._rows = Rows(4, 304 + 64, 16, CUDA)
    runner._text_rows, size = runner._rows.after(304 // 16), int(runner.model.config.vocab_size)
    runner._languages = torch.empty(1, dtype=torch.int64, device=CUDA)
    runner._rules = TranscriptRules(Tokens((301,), (298,), 309, 50), facts, size, runner._rows.token_ids)
    runner._sampler = Sampler(4, size, CUDA, runner._rows.token_ids)
    windows = [([299, 299], Window(features=b"", language_at=1)), ([5, 299, 300], Window(features=b""))]
    sampling = RowSampling(SamplingParams(), 5)
    admitted = [
        AdmittedRow.of(row, tokens, list(range(row * 20, row * 20 + 20)), sampling, window.encode())
        for row, (tokens, window) in enumerate(windows)
    ]
    plan = StepPlan(0, admitted, [], [2, 0, 1], [310, 0, 0], [1, 306, 307], [1, 1, 1], 1)
    monkeypatch.setattr(speech_runner, "HostCopy", lambda *_: None)
    assert callable(runner.begin(plan)(()))


@pytest.mark.parametrize("used", [None, [2], [1, 2]])
def test_adapters_of_rows_are_computed_without_waiting(used: list[int] | None) -> None:
    of_model = Adapters(CUDA)
    of_model.grow(32)
    of_model.take(1, slice(0, 2))
    of_model.take(2, slice(2, 5))
    linear, slices = nn.Linear(8, 6, device=CUDA), [slice(0, 4), slice(4, 6)]
    adapted = AdaptedLinear(linear, of_model, slices, 32, (CUDA, torch.float32))
    of_tokens, last = torch.empty(3, dtype=torch.int32, device=CUDA), torch.empty(1, dtype=torch.int64, device=CUDA)
    of_model.begin(of_tokens, used, last)
    with torch.inference_mode():
        assert adapted(torch.empty(1, 3, 8, device=CUDA)).shape == (1, 3, 6)
        assert adapted(torch.empty(1, 1, 8, device=CUDA)).shape == (1, 1, 6), "the last layer's tokens"
