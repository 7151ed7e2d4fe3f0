"""The heads that compute other results than one vector for each text, from the hidden states of a batch.

Called by `text_runner`. Hidden states are (T, H), packed; sequence i has the tokens starts[i] .. starts[i + 1] - 1.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from conveyor_engine.errors import ModelError
from conveyor_engine.model_files import SENTENCE_MODULES, read_object
from conveyor_engine.tasks.embed.execution.dense import open_weights, read_dense
from conveyor_engine.tasks.embed.execution.token_files import TokenVectors
from conveyor_engine.tasks.embed.execution.torch_files import read_linear
from conveyor_engine.tasks.embed.facts import SPARSE_NUMBERS_MAX
from conveyor_engine.text.tokenizer import Tokenizer

SPARSE_FILE: Final = "sparse_linear.pt"
TOKEN_FILE: Final = "colbert_linear.pt"
_LOGITS_MAX: Final = 1 << 24  # logits of SPLADE, or products of MaxSim, that are computed at once: 64 MiB
_SPLADE_FILE: Final = "1_SpladePooling/config.json"
_STANFORD_TENSOR: Final = "linear.weight"

ComputeLogits = Callable[[torch.Tensor], torch.Tensor]


class SpladeHead:
    """Makes a sparse vector of each sequence: a weight for each token of the vocabulary, most of them zero."""

    def __init__(self, directory: Path, compute_logits: ComputeLogits, vocab_size: int) -> None:
        """compute_logits: (1, tokens, H) -> (1, tokens, vocabulary). Raises ModelError."""
        settings = read_object(directory / _SPLADE_FILE)
        if (directory / SENTENCE_MODULES).is_file() and not settings:
            raise ModelError(f"{directory / _SPLADE_FILE}, which {SENTENCE_MODULES} needs, is missing")
        strategy = settings.get("pooling_strategy", "max")
        activation = settings.get("activation_function", "relu")
        if strategy not in ("max", "sum") or activation not in ("relu", "log1p_relu"):
            raise ModelError(
                f"{directory / _SPLADE_FILE} has {strategy!r:.50} of {activation!r:.50}, which is not known"
            )
        self._sums, self._num_logs = strategy == "sum", 2 if activation == "log1p_relu" else 1
        self._compute_logits = compute_logits
        self.chunk_tokens = max(1, _LOGITS_MAX // vocab_size)

    def __call__(self, hidden: torch.Tensor, starts: Sequence[int]) -> Iterator[torch.Tensor]:
        """Yield the sparse vector of one sequence after another, as `pooling.encode_splade` reads it.

        Only the row of one sequence and a chunk of logits are dense at once. The weights grow with the logits, so the
        maximum of the weights is the weight of the largest logit.
        """
        row: torch.Tensor | None = None
        sequence = 0
        for begin in range(0, starts[-1], self.chunk_tokens):
            end = min(begin + self.chunk_tokens, starts[-1])
            logits = self._compute_logits(hidden[None, begin:end])[0]
            logits = self._weigh(logits) if self._sums else logits
            while sequence < len(starts) - 1 and starts[sequence] < end:
                first, last = max(begin, starts[sequence]), min(end, starts[sequence + 1])
                part = logits[first - begin : last - begin]
                part = part.sum(0) if self._sums else part.amax(0)
                row = part if row is None else row + part if self._sums else torch.maximum(row, part)
                if last < starts[sequence + 1]:
                    break
                yield self._make_sparse(row if self._sums else self._weigh(row))
                row, sequence = None, sequence + 1

    def _weigh(self, logits: torch.Tensor) -> torch.Tensor:
        weights = logits.relu()
        for _ in range(self._num_logs):
            weights = weights.log1p()
        return weights

    @staticmethod
    def _make_sparse(row: torch.Tensor) -> torch.Tensor:
        """Return the indices, and then the bits of the weights, int32. One number too many shows that there are more.

        Copies, because slices would keep the rows of all sequences.
        """
        (indices,) = row.nonzero(as_tuple=True)  # NaN is not zero, so it is found
        indices = indices[: SPARSE_NUMBERS_MAX + 1]
        return torch.cat((indices.int(), row[indices].float().view(torch.int32)))


class LexicalHead:
    """bge-m3's weight for each token. A sparse vector has the largest weight of each token that a text has."""

    def __init__(self, directory: Path, hidden_size: int, device: torch.device) -> None:
        """Raises ModelError."""
        self._linear = read_linear(directory / SPARSE_FILE, hidden_size).to(device)
        if self._linear.out_features != 1:
            raise ModelError(
                f"{directory / SPARSE_FILE} has {self._linear.out_features} weights for each token, not one"
            )
        tokenizer = Tokenizer(directory)
        found = {name: tokenizer.find_special_id(name) for name in ("cls_token", "eos_token", "pad_token", "unk_token")}
        self._first, self._last = found["cls_token"], found["eos_token"]
        self._unused = np.array([each for each in found.values() if each is not None], dtype=np.int64)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return a weight for each token: (T, H) -> (T,), float32."""
        weights: torch.Tensor = self._linear(hidden.float())[:, 0].relu()
        return weights

    def make_sparse(
        self, token_ids: npt.NDArray[np.int64], weights: npt.NDArray[np.float32]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Return the tokens with a weight, in ascending order, and their largest weights."""
        indices, places = np.unique(token_ids, return_inverse=True)
        largest = np.zeros(len(indices), dtype=np.float32)
        np.maximum.at(largest, places, weights)
        kept = (largest != 0) & ~np.isin(indices, self._unused)
        return indices[kept], largest[kept]

    def trim(self, token_ids: npt.NDArray[np.int64], weights: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return the weights without those of a first and a last special token, as vLLM does."""
        begin = int(len(token_ids) > 0 and token_ids[0] == self._first)
        end = len(token_ids) - int(len(token_ids) > begin and token_ids[-1] == self._last)
        return weights[begin:end]


class TokenHead:
    """Makes a vector of each token: layers over its hidden state, then length 1."""

    def __init__(self, layers: nn.Module, size: int, *, normalizes: bool = True, drops_first: bool = False) -> None:
        """drops_first: whether a sequence's first token gets no vector, as in bge-m3."""
        self._layers, self._normalizes = layers, normalizes
        self.size, self.drops_first = size, drops_first

    def __call__(self, hidden: torch.Tensor, *, normalizes: bool | None) -> torch.Tensor:
        """(n, H) -> (n, size), float32. normalizes: what the request says; None: nothing."""
        vectors: torch.Tensor = self._layers(hidden.float())
        wanted = self._normalizes if normalizes is None else normalizes
        return functional.normalize(vectors, dim=-1) if wanted else vectors


def compute_max_sim(query: torch.Tensor, document: torch.Tensor) -> torch.Tensor:
    """Return the sum, over the vectors of a query (n, size), of the largest product with one of a document; (1,)."""
    if not len(document):
        return query.new_zeros(1)
    parts = torch.split(query, max(1, _LOGITS_MAX // len(document)))
    return torch.stack([(part @ document.t()).amax(1).sum() for part in parts]).sum(0, keepdim=True)


def read_token_head(
    directory: Path, found: TokenVectors | None, hidden_size: int, device: torch.device, pooled: nn.Module, size: int
) -> TokenHead:
    """Return the head for vectors of tokens. Raises ModelError.

    pooled, size: the layers behind the pooling. A model without a head for tokens applies them to each token.
    """
    if found is not None and found.dense:
        layers, size = read_dense(directory, found.dense, hidden_size, device)
        return TokenHead(layers, size, normalizes=found.normalizes)
    if found is not None:
        linear = _read_stanford(directory, hidden_size).to(device)
        return TokenHead(linear, linear.out_features)
    if (directory / TOKEN_FILE).is_file():
        linear = read_linear(directory / TOKEN_FILE, hidden_size).to(device)
        return TokenHead(linear, linear.out_features, drops_first=True)
    return TokenHead(pooled, size)


def _read_stanford(directory: Path, hidden_size: int) -> nn.Linear:
    """Return the projection that a checkpoint of Stanford's ColBERT has beside the encoder. Raises ModelError."""
    for path in sorted(directory.glob("*.safetensors")):
        with open_weights(path) as file:
            if _STANFORD_TENSOR not in file.keys():  # noqa: SIM118 (no dict)
                continue
            weight = file.get_tensor(_STANFORD_TENSOR).float()
        if weight.dim() != 2 or weight.shape[1] != hidden_size:
            raise ModelError(f"{_STANFORD_TENSOR} in {path} has the shape {tuple(weight.shape)}")
        linear = nn.Linear(hidden_size, len(weight), bias=False, device="meta")
        linear.load_state_dict({"weight": weight}, assign=True)
        return linear.eval().requires_grad_(False)
    raise ModelError(f"{directory} has no tensor {_STANFORD_TENSOR}, which a ColBERT model needs")
