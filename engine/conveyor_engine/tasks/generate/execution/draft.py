"""Runs a smaller model that guesses the next tokens of rows. Used by `runner` if there is a draft model.

The draft model has the tokens of the model, and a KV cache of its own with blocks of the same numbers: a row's block
table is valid in both. So preempted rows and shared prefixes need no code here. `scheduling.model_drafts` decides what
the draft model reads and when it guesses. Each guess is its most likely token. `heads` does the same with a head.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import msgspec
import torch
from transformers import PreTrainedModel

from conveyor_engine.errors import ConfigError, named
from conveyor_engine.execution.attention.interface import PagedStep
from conveyor_engine.execution.attention.select import select_backend
from conveyor_engine.execution.batch import Batch, build_batch
from conveyor_engine.execution.largest_step import estimate_step
from conveyor_engine.execution.limits import find_context
from conveyor_engine.execution.models.latent import keep_latents
from conveyor_engine.execution.models.native_layers import join_layers
from conveyor_engine.execution.models.probe import probe_layers
from conveyor_engine.execution.models.rope import fix_frequencies
from conveyor_engine.execution.models.towers import take_towers
from conveyor_engine.execution.placement import Placement
from conveyor_engine.execution.rows import Rows
from conveyor_engine.execution.start import RunnerStart
from conveyor_engine.tasks.generate.execution.draft_tokens import check_tokens
from conveyor_engine.wire.step import READ_TOKENS, RowMask, StepPlan, StepResult

Forward = tuple[int, int, float]  # rows, tokens, seconds
Sample = Callable[[Sequence[RowMask]], Callable[[], StepResult]]  # as in `loop.executor`
Readings = Sequence[tuple[int, int, int]]  # as in a plan


class Guesser(ABC):
    """A model that guesses tokens, and its KV cache."""

    lag: ClassVar[int] = 0  # by how much the position of a token that it reads is less than in the row
    reads_last = False  # whether it reads the hidden states of all tokens after the model's last layer

    def __init__(self, own: RunnerStart, model: PreTrainedModel, max_model_len: int, setting: str) -> None:
        """Prepare the loaded model. setting: is named in errors. Raises ConfigError or ModelError."""
        config = own.config
        self._model = model
        fix_frequencies(model, max_model_len)
        self._backend = select_backend(config.attention_backend, own.device, own.dtype, config.block_size)
        keep_latents(model, self._backend.widest_latent)
        self._layers, states = probe_layers(model, own.device)
        if states:
            name = type(model).__name__
            raise ConfigError(f"`{setting}` is a {name}, which keeps states that cannot go back; use another")
        with named(setting):
            own.fuse(model, len(self._layers))
        join_layers(model)
        self._device, self._dtype, self._block_size = own.device, own.dtype, config.block_size
        self.block_bytes = self._backend.block_bytes(self._layers, config.block_size, own.dtype)
        self.step_bytes = estimate_step(model, READ_TOKENS, own.max_num_seqs)

    def allocate(self, num_blocks: int) -> None:
        """Allocate its cache."""
        self._backend.allocate(self._layers, num_blocks, self._block_size, self._dtype, self._device)

    def keep(self, slots: torch.Tensor) -> None:  # noqa: B027
        """Keep what it reads of the model's last forward, whose tokens have these slots (T,): here nothing."""

    def draft(self, plan: StepPlan, rows: Rows) -> tuple[StepPlan, list[Forward]]:
        """Read what the plan says and guess its drafts. Returns the plan with the drafts, and how long this took.

        The drafts are also written into the rows.
        """
        wanted = {row: len(drafts) for row, drafts in zip(plan.rows[plan.num_decodes :], plan.drafts, strict=False)}
        made: dict[int, list[int]] = {row: [] for row in wanted}
        forwards, going = list[Forward](), plan.readings
        while going:
            began = time.perf_counter()
            guesses = self._guess(going, rows, is_first=not forwards)
            then = []
            for (row, first, number), token_id in zip(going, guesses.tolist(), strict=True):
                if len(made.get(row, ())) < wanted.get(row, 0):
                    made[row].append(token_id)
                    then.append((row, first + number, 1))
            if then:
                written = torch.tensor([(row, position + self.lag, made[row][-1]) for row, position, _ in then])
                rows.append(written[:, 0], written[:, 1], written[:, 2])
            forwards.append((len(going), sum(each[2] for each in going), time.perf_counter() - began))
            going = [each for each in then if len(made[each[0]]) < wanted[each[0]]]
        return msgspec.structs.replace(plan, drafts=list(made.values())), forwards

    def _build_batch(self, readings: Readings, rows: Rows) -> tuple[Batch, PagedStep]:
        """Return a step of these tokens, which has logits after each row's last one."""
        numbers = [number for _, _, number in readings]
        plan = StepPlan(
            number=0,
            admitted=[],
            new_blocks=[],
            rows=[row for row, _, _ in readings],
            num_computed_tokens=[first for _, first, _ in readings],
            num_tokens=numbers,
            num_logits=[1] * len(numbers),
            num_decodes=numbers.count(1),
        )
        batch = build_batch(plan, rows, self._block_size)
        return batch, PagedStep(self._backend, batch.metadata, token_rows=batch.token_rows)

    @abstractmethod
    def _guess(self, readings: Readings, rows: Rows, *, is_first: bool) -> torch.Tensor:
        """Compute these tokens (row, first, number), and return the most likely token after each row's last one.

        is_first: whether a plan has these readings; False: each reads the token that was guessed last.
        """


class DraftModel(Guesser):
    """A smaller model with the same tokens."""

    def __init__(self, start: RunnerStart, placement: Placement, vocab_size: int, max_model_len: int) -> None:
        """Load the draft model. start: of the model. Raises ConfigError or ModelError."""
        config = start.config
        assert config.draft_model is not None
        with named("draft_model"):
            own = RunnerStart(replace(config, model=config.draft_model), placement, start.progress)
        _check_context(find_context(own.model_config), max_model_len)
        with named("draft_model"):
            model = own.load()
        if own.sees:
            take_towers(model)  # it reads texts only
        self._own_size, self._vocab_size = model.get_input_embeddings().num_embeddings, vocab_size
        check_tokens(Path(config.model), Path(config.draft_model), (vocab_size, self._own_size))
        super().__init__(own, model, max_model_len, "draft_model")

    def _guess(self, readings: Readings, rows: Rows, *, is_first: bool) -> torch.Tensor:
        batch, paged = self._build_batch(readings, rows)
        logits: torch.Tensor = self._model(
            input_ids=batch.input_ids.clamp_max(self._own_size - 1),  # embeddings may be padded to different sizes
            position_ids=batch.position_ids,
            use_cache=False,
            logits_to_keep=batch.logit_indices,
            paged=paged,
        ).logits[0]
        return logits[:, : self._vocab_size].argmax(-1)


def _check_context(context: int | None, max_model_len: int) -> None:
    if context is not None and context < max_model_len:
        raise ConfigError(
            f"`draft_model` was made for at most {context} tokens, and a request has up to {max_model_len}; set "
            f"`max_model_len` to {context} or less"
        )


def add_forwards(forwards: list[Forward], sample: Sample) -> Sample:
    """Return a function that does what `sample` does, and adds the draft model's forwards to the result."""
    if not forwards:
        return sample

    def sample_and_add(masks: Sequence[RowMask]) -> Callable[[], StepResult]:
        read = sample(masks)
        return lambda: msgspec.structs.replace(read(), forwards=forwards)

    return sample_and_add
