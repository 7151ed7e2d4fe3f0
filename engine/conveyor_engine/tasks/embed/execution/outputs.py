"""Finds out from a model's files what requests can get of it. Called by `text_runner`, and by `check`."""

from pathlib import Path

from conveyor_engine.execution.models.kinds import MASKED_LM, find_kind
from conveyor_engine.model_files import has_vision
from conveyor_engine.tasks.embed.execution.files import Pooling, read_pooling
from conveyor_engine.tasks.embed.execution.heads import SPARSE_FILE
from conveyor_engine.tasks.embed.execution.token_files import TokenVectors, read_token_vectors
from conveyor_engine.tasks.embed.facts import Output


def read_files(directory: Path) -> tuple[Pooling, TokenVectors | None]:
    """Return how a text becomes one vector, and how its tokens become vectors if it is a ColBERT model.

    Raises ModelError.
    """
    tokens = read_token_vectors(directory)
    if tokens is None:
        return read_pooling(directory), None
    return Pooling(max_seq_length=tokens.max_seq_length, has_vector=False), tokens


def list_outputs(
    directory: Path, pooling: Pooling, tokens: TokenVectors | None, has_splade: bool
) -> tuple[Output, ...]:
    """Return the outputs, the preferred ones first. has_splade: whether logits become sparse vectors."""
    has_weights = (directory / SPARSE_FILE).is_file()
    has_tokens = pooling.has_vector or tokens is not None
    may: dict[Output, bool] = {
        "embed": pooling.has_vector,
        "token_embed": has_tokens,
        "token_classify": has_weights,
        "embed_all": has_tokens,
        "embed_sparse": has_splade or has_weights,
    }
    return tuple(output for output, can in may.items() if can)


def find_outputs(directory: Path) -> tuple[Output, ...]:
    """Return the outputs of a model whose weights are not there. Raises ModelError."""
    if has_vision(directory):
        return ("embed",)
    return list_outputs(directory, *read_files(directory), find_kind("embed", directory) is MASKED_LM)
