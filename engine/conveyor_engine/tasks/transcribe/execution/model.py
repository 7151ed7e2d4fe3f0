"""Applies Whisper's rules for timestamps to the logits of a transcript. Used by `runner`.

Timestamps come in pairs and never decrease. If the timestamps together have a higher probability than any other token,
the next token is a timestamp. The rules equal those of transformers' `WhisperTimeStampLogitsProcessor`. Unlike that
class, this module copies nothing from the device to the host.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from conveyor_engine.execution.sampling.processor import Samples
from conveyor_engine.execution.transfer import to_device
from conveyor_engine.tasks.transcribe.facts import AudioFacts

_NEVER: Final = float("-inf")


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids from the model's generation_config.json that limit the tokens of a transcript."""

    suppressed: Sequence[int]  # never generated
    suppressed_first: Sequence[int]  # never generated as the first token of a window
    no_timestamps: int
    max_first_timestamp: int | None  # number of the latest timestamp that may begin a window; 0 is 0 s; None: no limit

    @classmethod
    def read(cls, config: Any) -> "Tokens":
        """Read the ids from transformers' GenerationConfig. Raises what `int` and `tuple` raise."""
        latest = getattr(config, "max_initial_timestamp_index", None)
        return cls(
            tuple(map(int, config.suppress_tokens or ())),
            tuple(map(int, config.begin_suppress_tokens or ())),
            int(config.no_timestamps_token_id),
            None if latest is None else int(latest),
        )


class TranscriptRules:
    """The rules of one model, and for each row the number of prompt tokens and the newest timestamp."""

    def __init__(self, tokens: Tokens, facts: AudioFacts, vocab_size: int, token_ids: torch.Tensor) -> None:
        """token_ids: int32 (rows, positions), the tokens of all rows."""
        device = token_ids.device
        self._facts, self._token_ids, self._device = facts, token_ids, device
        self.no_speech = tokens.no_timestamps - 1
        self._suppressed = torch.tensor([*tokens.suppressed, tokens.no_timestamps], device=device)
        first = torch.zeros(vocab_size)
        first[[*tokens.suppressed_first]] = _NEVER
        first[: facts.first_timestamp] = _NEVER
        if tokens.max_first_timestamp is not None:
            first[facts.first_timestamp + tokens.max_first_timestamp + 1 :] = _NEVER
        self._first = first.to(device)
        self._times = torch.arange(vocab_size - facts.first_timestamp, device=device)
        self._num_prompt_tokens = np.zeros(len(token_ids), dtype=np.int64)  # by row
        self._last_time = torch.full((len(token_ids),), -1, device=device)  # the newest timestamp of each row; -1: none

    def set_row(self, row: int, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """Assign a transcript to the row.

        token_ids: the prompt and, if the transcript was preempted, the tokens that it already has.
        """
        first = self._facts.first_timestamp
        times = [token - first for token in token_ids[num_prompt_tokens:] if token >= first]
        self._num_prompt_tokens[row] = num_prompt_tokens
        self._last_time[row] = times[-1] if times else -1

    def apply(self, logits: torch.Tensor, samples: Samples) -> None:
        """Set the logits of forbidden tokens to minus infinity, in place. logits: float32 (entries, vocabulary)."""
        first = self._facts.first_timestamp
        number = samples.positions - self._num_prompt_tokens[samples.rows]
        rows, positions = samples.device_rows, samples.device_positions
        words, times = logits[:, :first], logits[:, first:]
        logits.index_fill_(1, self._suppressed, _NEVER)
        if len(beginning := np.flatnonzero(number == 0)):
            logits[to_device(beginning, self._device)] += self._first
        has_last, has_two = to_device(np.stack((number > 0, number > 1)), self._device)
        was_time = (self._token_ids[rows, positions - 1] >= first) & has_last
        had_time = (self._token_ids[rows, (positions - 2).clamp_min(0)] >= first) | ~has_two
        opens = was_time & ~had_time  # the newest token is a pair's first timestamp; the second one or the end follows
        times.masked_fill_((was_time & had_time)[:, None], _NEVER)
        words[:, : self._facts.end].masked_fill_(opens[:, None], _NEVER)
        lowest = self._last_time[rows] + torch.where(opens, 0, 1)
        times.masked_fill_(self._times < lowest[:, None], _NEVER)
        must_be_time = times.logsumexp(dim=-1) > words.amax(dim=-1)
        words.masked_fill_(must_be_time[:, None], _NEVER)

    def accept(self, samples: Samples, tokens: torch.Tensor) -> None:
        """Record the newest timestamp of each row. tokens: int64 (entries,), the sampled tokens."""
        rows, times = samples.device_rows, tokens - self._facts.first_timestamp
        self._last_time[rows] = torch.where(times >= 0, times, self._last_time[rows])
