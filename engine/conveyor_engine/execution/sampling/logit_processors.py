"""The masks and logit processors, which change a row's logits before a token is chosen. Masks come first.

Used by `sampler`; `processor` defines what a processor is. Processors cost nothing for rows that do not use them. Their
order and their definitions are vLLM's.
"""

import math
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from torch.nn import functional

from conveyor_engine.execution.sampling.penalties import Penalties
from conveyor_engine.execution.sampling.processor import ALWAYS, Int64, LogitProcessor, Samples
from conveyor_engine.execution.sampling.row_values import RowLists, RowValues
from conveyor_engine.execution.transfer import to_device
from conveyor_engine.wire.step import RowMask, RowSampling

GREEDY_BELOW = 1e-5  # temperatures below this are greedy, as in vLLM: float32 cannot divide by much less
_BITS = 8
_ALL_ALLOWED = 2**_BITS - 1
_ANY, _NO_TOKEN = -1, -2
_FORBIDDEN = -math.inf


def build_processors(max_num_seqs: int, device: torch.device, token_ids: torch.Tensor) -> list[LogitProcessor]:
    """Return all processors in the order in which they act. top_k and top_p come after them, in `Cuts`.

    token_ids: the tokens of all rows (`Rows.token_ids`).
    """
    return [
        AllowedTokens(max_num_seqs, device),
        BadWords(max_num_seqs, device, token_ids),
        MinTokens(max_num_seqs, device),
        LogitBias(max_num_seqs, device),
        Penalties(max_num_seqs, device, token_ids),
        Temperature(max_num_seqs, device),
        MinP(max_num_seqs, device),
    ]


class AllowedTokens:
    """Restricts a row to the tokens of `allowed_token_ids`."""

    changes_best = True

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._token_ids = RowLists(max_num_seqs, np.int64, device)

    def set_row(self, row: int, sampling: RowSampling) -> int:
        if not sampling.params.allowed_token_ids:
            return 0
        self._token_ids[row] = sampling.params.allowed_token_ids
        return ALWAYS

    def apply(self, logits: torch.Tensor, samples: Samples, users: Int64) -> None:
        index, of_users = samples.select(users)
        token_ids = self._token_ids[of_users.device_rows]
        only = logits[index].gather(1, token_ids)
        logits[index] = logits.new_full((len(users), logits.shape[1]), _FORBIDDEN).scatter_(1, token_ids, only)


class BadWords:
    """Keeps a row's output from containing the sequences of tokens in `bad_words`."""

    changes_best = True

    def __init__(self, max_num_seqs: int, device: torch.device, token_ids: torch.Tensor) -> None:
        self._device = device
        self._token_ids = token_ids
        self._num_prompt_tokens = RowValues.full(max_num_seqs, 0, np.int64, device)
        self._words = RowValues(np.full((max_num_seqs, 1, 1), _ANY, dtype=np.int64), device)  # (rows, words, tokens)

    def set_row(self, row: int, sampling: RowSampling) -> int:
        words = sampling.params.bad_words
        if not words:
            return 0
        self._widen(len(words), max(map(len, words)))
        _, num_words, length = self._words.host.shape
        padded = [(*(_ANY,) * (length - len(word)), *word) for word in words]
        self._words[row] = padded + padded[-1:] * (num_words - len(words))
        self._num_prompt_tokens[row] = sampling.num_prompt_tokens
        return ALWAYS

    def apply(self, logits: torch.Tensor, samples: Samples, users: Int64) -> None:
        index, of_users = samples.select(users)
        words = self._words[of_users.device_rows]
        begins, last = words[..., :-1], words[..., -1]
        completes = ((begins == self._recent(of_users, begins.shape[2])[:, None]) | (begins == _ANY)).all(-1)
        forbidden = torch.zeros_like(last, dtype=logits.dtype).masked_fill_(completes, _FORBIDDEN)
        logits[index] = logits[index].scatter_add(1, last, forbidden)

    def _recent(self, samples: Samples, number: int) -> torch.Tensor:
        """Return the last tokens of each entry's output, int64 (entries, number); _NO_TOKEN before its beginning."""
        rows = samples.device_rows
        places = samples.device_positions[:, None] - torch.arange(number, 0, -1, device=self._device)
        recent = self._token_ids[rows[:, None], places.clamp_min(0)].long()
        return recent.masked_fill(places < self._num_prompt_tokens[rows], _NO_TOKEN)

    def _widen(self, num_words: int, length: int) -> None:
        host = self._words.host
        more_words, more_tokens = max(0, num_words - host.shape[1]), max(0, length - host.shape[2])
        if more_words or more_tokens:
            wider = np.pad(host, ((0, 0), (0, more_words), (0, 0)), mode="edge")
            wider = np.pad(wider, ((0, 0), (0, 0), (more_tokens, 0)), constant_values=_ANY)
            self._words = RowValues(wider, self._device)


class MinTokens:
    """Keeps a row from choosing a token that ends the output, until the output has `min_tokens` tokens."""

    changes_best = True

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._stop_ids = RowLists(max_num_seqs, np.int64, device)

    def set_row(self, row: int, sampling: RowSampling) -> int:
        if not sampling.stop_ids:
            return 0
        self._stop_ids[row] = sampling.stop_ids
        return sampling.min_length

    def apply(self, logits: torch.Tensor, samples: Samples, users: Int64) -> None:
        entries = to_device(users, logits.device)
        stop_ids = self._stop_ids[samples.device_rows[entries]]
        logits.index_put_((entries[:, None], stop_ids), logits.new_full((), _FORBIDDEN))


class LogitBias:
    """Adds the biases of `logit_bias` to the logits of its tokens."""

    changes_best = True

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._token_ids = RowLists(max_num_seqs, np.int64, device)
        self._biases = RowLists(max_num_seqs, np.float32, device)

    def set_row(self, row: int, sampling: RowSampling) -> int:
        if not sampling.params.logit_bias:
            return 0
        self._token_ids[row], self._biases[row] = zip(*sampling.params.logit_bias, strict=True)
        return ALWAYS

    def apply(self, logits: torch.Tensor, samples: Samples, users: Int64) -> None:
        """Add the biases. `RowLists` may repeat a token; its bias still counts once, because all writes to it are
        equal."""
        entries = to_device(users, logits.device)
        rows = samples.device_rows[entries]
        where = entries[:, None], self._token_ids[rows]
        logits.index_put_(where, logits[where] + self._biases[rows])


class Temperature:
    """Divides the logits by a row's temperature. Above 1 this flattens the distribution, below 1 it sharpens it."""

    changes_best = False

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._temperature = RowValues.full(max_num_seqs, 1, np.float32, device)

    def set_row(self, row: int, sampling: RowSampling) -> int:
        self._temperature[row] = sampling.params.temperature
        return 0 if sampling.params.temperature == 1 else ALWAYS

    def apply(self, logits: torch.Tensor, samples: Samples, users: Int64) -> None:
        logits.div_(self._temperature[samples.device_rows])  # all entries: unset ones have 1, and selecting would copy


class MinP:
    """Excludes tokens whose probability is below `min_p` times the highest one.

    `sampler` also passes `min_p` to the kernels.
    """

    changes_best = False

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._floor = RowValues.full(max_num_seqs, _FORBIDDEN, np.float32, device)

    def set_row(self, row: int, sampling: RowSampling) -> int:
        self._floor[row] = find_floor(sampling.params.min_p)
        return ALWAYS if sampling.params.min_p else 0

    def apply(self, logits: torch.Tensor, samples: Samples, users: Int64) -> None:
        logits.masked_fill_(logits < self._floor[samples.device_rows], _FORBIDDEN)


def find_floor(min_p: float) -> float:
    """Return the logarithm of the least weight that may be drawn, relative to the best token's weight."""
    return math.log(min_p) if min_p else _FORBIDDEN


def mask_rows(logits: torch.Tensor, samples: Samples, masks: Sequence[RowMask]) -> torch.Tensor:
    """Return a copy of logits (entries, vocabulary) with minus infinity for tokens that the masks do not allow.

    The packed bits are copied to the device. There, each byte selects the eight numbers that are added to its tokens'
    logits. On a CPU this takes a fraction of the time of `masked_fill`, which branches for each token. A row's mask may
    be longer than the vocabulary. NaN stays NaN, and a forbidden infinity becomes NaN.
    """
    entry_of = {row: entry for entry, row in enumerate(samples.rows.tolist())}
    packed = np.full((len(samples.rows), len(masks[0].allowed)), _ALL_ALLOWED, dtype=np.uint8)
    for mask in masks:
        packed[entry_of[mask.row]] = np.frombuffer(mask.allowed, dtype=np.uint8)
    table = _addends_of_bytes(logits.dtype, logits.device)
    addends = functional.embedding(to_device(packed, logits.device).int(), table)
    return addends.flatten(1)[:, : logits.shape[1]].add_(logits)


@cache
def _addends_of_bytes(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return (256, 8): for each byte, the number to add to the logit of each of its bits, the lowest bit first."""
    bits = np.unpackbits(np.arange(2**_BITS, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return torch.zeros(bits.shape, dtype=dtype).masked_fill(torch.from_numpy(bits) == 0, _FORBIDDEN).to(device)
