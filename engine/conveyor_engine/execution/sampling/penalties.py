"""Applies penalties to tokens that a row already has. One of `logit_processors`.

It reads the rows' tokens on the device. Therefore steps that are launched ahead see all tokens, and no counts have to
be restored after a preemption.
"""

from collections.abc import Iterator

import numpy as np
import torch

from conveyor_engine.execution.sampling.processor import ALWAYS, Int64, Samples
from conveyor_engine.execution.sampling.row_values import RowValues
from conveyor_engine.execution.transfer import to_device
from conveyor_engine.wire.step import RowSampling

TOKENS_AT_ONCE = 2**20  # of all rows together; each temporarily takes about 40 bytes on the device
_REPETITION, _FREQUENCY, _PRESENCE = 0, 1, 2
_NEUTRAL = (1.0, 0.0, 0.0)


class Penalties:
    """Applies repetition, frequency and presence penalties.

    Repetition divides positive logits, and multiplies negative logits, of tokens in the prompt or the output. Frequency
    is subtracted once for each occurrence of a token in the output. Presence is subtracted once if the output has the
    token.
    """

    changes_best = True

    def __init__(self, max_num_seqs: int, device: torch.device, token_ids: torch.Tensor) -> None:
        self._device = device
        self._token_ids = token_ids
        self._penalties = RowValues(np.tile(np.array(_NEUTRAL, dtype=np.float32), (max_num_seqs, 1)), device)
        self._num_prompt_tokens = RowValues.full(max_num_seqs, 0, np.int64, device)

    def set_row(self, row: int, sampling: RowSampling) -> int:
        params = sampling.params
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        if penalties == _NEUTRAL:
            return 0
        self._penalties[row] = penalties
        self._num_prompt_tokens[row] = sampling.num_prompt_tokens
        return ALWAYS

    def apply(self, logits: torch.Tensor, samples: Samples, users: Int64) -> None:
        for part in _split(users, samples.positions[users]):
            _, of_part = samples.select(part)
            self._penalize(logits, to_device(part, self._device), of_part)

    def _penalize(self, logits: torch.Tensor, entries: torch.Tensor, samples: Samples) -> None:
        """Apply the penalties to some entries, with one flat list of all their tokens. Token i belongs to entry
        `user[i]`."""
        lengths = samples.device_positions
        total = int(samples.positions.sum())
        numbers = torch.arange(len(entries), device=self._device)
        user = torch.repeat_interleave(numbers, lengths, output_size=total)
        place = torch.arange(total, device=self._device) - (lengths.cumsum(0) - lengths)[user]
        rows = samples.device_rows
        token_ids = self._token_ids[rows[user], place].long()
        where = entries[user], token_ids
        penalties = self._penalties[rows][user]
        chosen = self._penalties.host[samples.rows] != _NEUTRAL
        if chosen[:, _REPETITION].any():
            _repeat(logits, where, penalties[:, _REPETITION])
        if chosen[:, _FREQUENCY:].any():
            is_output = place >= self._num_prompt_tokens[rows].squeeze(1)[user]
            counts = _count(user, token_ids, is_output, (len(entries), logits.shape[1]))
            penalty = penalties[:, _FREQUENCY] * counts + penalties[:, _PRESENCE] * (counts > 0)
            logits[where] = logits[where] - penalty


def _split(users: Int64, lengths: Int64) -> Iterator[Int64]:
    """Split the users into parts with about TOKENS_AT_ONCE tokens each."""
    ends = np.cumsum(lengths) // TOKENS_AT_ONCE
    yield from np.split(users, np.flatnonzero(np.diff(ends)) + 1)


def _repeat(logits: torch.Tensor, where: tuple[torch.Tensor, torch.Tensor], penalty: torch.Tensor) -> None:
    """Apply the repetition penalty. A token that occurs several times is written several times with the same value."""
    values = logits[where]
    logits[where] = torch.where(values > 0, values / penalty, values * penalty)


def _count(user: torch.Tensor, token_ids: torch.Tensor, counts: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """For each token, return how often it occurs among its user's tokens, float32.

    Only tokens for which `counts` is true are counted. The numbers are exact, because the order of addition does not
    matter for integers.
    """
    totals = torch.zeros(shape, device=user.device)
    totals.view(-1).scatter_add_(0, user * shape[1] + token_ids, counts.float())
    return totals[user, token_ids]
