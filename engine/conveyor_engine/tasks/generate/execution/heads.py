"""Runs a head that guesses the next tokens of rows from hidden states of the model. Used by `runner`.

The head reads a token's hidden state together with the token after it. So a step keeps the hidden states of its tokens
in a cache with the model's blocks, and the head reads them when drafts pay, as a draft model reads tokens. Its first
guess reads the model's hidden states, and each further guess the head's own one.
"""

from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.errors import ConfigError, named
from conveyor_engine.execution.models.eagle import is_eagle, load_eagle
from conveyor_engine.execution.models.heads import load_own_head
from conveyor_engine.execution.placement import Placement
from conveyor_engine.execution.rows import Rows
from conveyor_engine.execution.start import RunnerStart
from conveyor_engine.tasks.generate.execution.draft import DraftModel, Guesser, Readings
from conveyor_engine.tasks.generate.execution.draft_tokens import check_tokens, has_tokenizer


class Watch:
    """Notes hidden states while the model computes: those after its last norm, or the inputs of some layers."""

    def __init__(self, model: PreTrainedModel, layers: list[int] | None) -> None:
        """layers: None for the states after the last norm. Raises ConfigError if the model has no such layers."""
        self._noted: dict[int, torch.Tensor] = {}
        self.reads_last = layers is None
        decoder = model.get_decoder()
        if layers is None:
            decoder.register_forward_hook(lambda _, __, out: self._note(0, out.last_hidden_state))
            return
        parts = getattr(decoder, "layers", None)
        if not isinstance(parts, nn.ModuleList) or len(parts) <= max(layers):
            raise ConfigError(f"`draft_model` is a head that reads layers, which {type(model).__name__} does not show")
        for number, layer in enumerate(layers):
            parts[layer].register_forward_pre_hook(_note_input(self, number), with_kwargs=True)

    def _note(self, number: int, hidden_states: torch.Tensor) -> None:
        self._noted[number] = hidden_states[0]

    def take(self) -> torch.Tensor:
        """Return what was noted in the last forward: (T, numbers of a token)."""
        found = [self._noted[number] for number in sorted(self._noted)]
        self._noted.clear()
        return found[0] if len(found) == 1 else torch.cat(found, dim=-1)


def _note_input(watch: Watch, number: int) -> Any:
    def note(_: nn.Module, positional: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        watch._note(number, positional[0] if positional else keywords["hidden_states"])

    return note


class Head(Guesser):
    """A head, and the hidden states that it reads."""

    lag: ClassVar[int] = 1

    def __init__(
        self,
        own: RunnerStart,
        target: PreTrainedModel,
        max_model_len: int,
        setting: str,
        layers: list[int] | None = None,
        tokens: torch.Tensor | None = None,
    ) -> None:
        """Load and prepare the head. Raises ConfigError or ModelError.

        own: with the head. target: the model. setting: see `Guesser`. layers: see `Watch`. tokens: the model's token
        for each that the head guesses; None: the head has the model's output layer.
        """
        super().__init__(own, own.load(), max_model_len, setting)
        self._watch = Watch(target, layers)
        self.reads_last = layers is None
        self._tokens = tokens
        if tokens is None:
            self._model.set_output_embeddings(target.get_output_embeddings())
        if not getattr(self._model.config, "num_embedded", 0):
            self._model.set_input_embeddings(target.get_input_embeddings())
        self._width = target.config.get_text_config().hidden_size * len(layers or (0,))
        token_bytes = self._width * self._dtype.itemsize
        self.block_bytes += self._block_size * token_bytes
        # What a step of the model notes, and the inputs of several layers side by side.
        self.step_bytes += own.max_num_batched_tokens * token_bytes * (1 if layers is None else 2)
        self._kept = torch.empty((0, self._width), dtype=self._dtype)
        self._noted = torch.empty(0)  # its own hidden states of the last forward (T, H)
        self._last: dict[int, torch.Tensor] = {}  # of each row's last token (H,)
        chains_normed = self._model.chains_normed

        def note(_: nn.Module, inputs: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
            self._noted = (out if chains_normed else inputs[0])[0]

        self._model.get_decoder().norm.register_forward_hook(note)

    def allocate(self, num_blocks: int) -> None:
        super().allocate(num_blocks)
        self._kept = torch.empty((num_blocks * self._block_size, self._width), dtype=self._dtype, device=self._device)

    def keep(self, slots: torch.Tensor) -> None:
        self._kept[slots] = self._watch.take()

    def _guess(self, readings: Readings, rows: Rows, *, is_first: bool) -> torch.Tensor:
        batch, paged = self._build_batch(readings, rows)
        of_rows = [row for row, _, _ in readings]
        hidden = self._kept[batch.metadata.slot_mapping] if is_first else torch.stack([self._last[r] for r in of_rows])
        logits: torch.Tensor = self._model(
            input_ids=rows.token_ids[batch.token_rows, batch.position_ids[0] + self.lag].long()[None],
            hidden_states=hidden[None],
            position_ids=batch.position_ids,
            use_cache=False,
            logits_to_keep=batch.logit_indices,
            paged=paged,
        ).logits[0]
        self._last = dict(zip(of_rows, self._noted[batch.logit_indices], strict=True))
        guesses = logits.argmax(-1)
        return guesses if self._tokens is None else self._tokens[guesses]


def reads_layers(config: EngineConfig) -> bool:
    """Return whether drafts read the inputs of the model's layers, which must then be computed one by one."""
    return config.speculation == "draft" and is_eagle(Path(config.draft_model or ""))


def open_guesser(start: RunnerStart, placement: Placement, target: PreTrainedModel, max_model_len: int) -> Guesser:
    """Load what guesses tokens, as configured. start, target: of the model. Raises ConfigError or ModelError."""
    config = start.config
    vocab_size = target.get_input_embeddings().num_embeddings
    if config.speculation == "mtp":
        own = RunnerStart(config, placement, start.progress, load=load_own_head)
        return Head(own, target, max_model_len, "speculation")
    if not reads_layers(config):
        return DraftModel(start, placement, vocab_size, max_model_len)
    directory = Path(config.draft_model or "")
    with named("draft_model"):
        model, tokens, layers = load_eagle(directory, target, vocab_size, start.dtype)
    if has_tokenizer(directory):  # `load_eagle` compares the numbers of tokens
        check_tokens(Path(config.model), directory, (vocab_size, vocab_size))
    own = RunnerStart(config, placement, start.progress, load=lambda *_: model.to(start.device))
    return Head(own, target, max_model_len, "draft_model", layers, tokens)
