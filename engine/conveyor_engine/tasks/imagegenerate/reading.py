"""Loads the model's tokenizers for prompts, which the workers share. Does not import torch."""

from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from conveyor_engine.errors import ModelError
from conveyor_engine.model_files import read_object
from conveyor_engine.tasks.imagegenerate.layouts import T5, Encoder, read_layout

CONTEXT_MAX: Final = 4096  # limit on the tokens of a prompt; CLIP has 77
_ERRORS: Final = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError,
    ValueError,
)  # fmt: skip


class PromptTokenizer:
    """Pads and cuts prompts as diffusers' pipeline does, for each text encoder of the model."""

    def __init__(self, tokenizers: Sequence[tuple[Any, int]]) -> None:
        """tokenizers: each with the number of tokens of its prompts."""
        self._tokenizers = tokenizers

    def encode(self, text: str) -> tuple[list[bytes], int]:
        """Return the tokens for each text encoder (uint32, padded), and the most that are not padding."""
        packed, numbers = [], []
        for tokenizer, num_tokens in self._tokenizers:
            encoded = tokenizer(text, padding="max_length", max_length=num_tokens, truncation=True)
            packed.append(array("I", encoded["input_ids"]).tobytes())
            numbers.append(sum(encoded["attention_mask"]))
        return packed, max(numbers)


def load_tokenizer(directory: Path) -> PromptTokenizer:
    """Load the tokenizers, and check that they pad prompts to their length. Raises ModelError."""
    return PromptTokenizer([_load(directory, encoder) for encoder in read_layout(directory).encoders])


def _load(directory: Path, encoder: Encoder) -> tuple[Any, int]:
    """Return the tokenizer of a text encoder, and the number of tokens of its prompts."""
    from transformers import CLIPTokenizer, T5Tokenizer

    folder, kind = directory / encoder.tokenizer, T5Tokenizer if encoder.kind == T5 else CLIPTokenizer
    positions = encoder.num_tokens  # T5 has relative positions, so prompts of any length
    if positions is None:
        positions = read_object(directory / encoder.folder / "config.json").get("max_position_embeddings", 77)
    try:
        tokenizer = kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        num_tokens = encoder.num_tokens or int(tokenizer.model_max_length)
        if not (isinstance(positions, int) and 2 <= num_tokens <= min(positions, CONTEXT_MAX)):
            raise ModelError(
                f"the tokenizer in {folder} makes prompts of {str(num_tokens)[:40]} tokens, but the text encoder has "
                f"{str(positions)[:40]} positions"
            )
        if len(tokenizer("", padding="max_length", max_length=num_tokens, truncation=True)["input_ids"]) != num_tokens:
            raise ModelError(f"the tokenizer in {folder} does not pad prompts")
    except _ERRORS as error:
        text = " ".join(str(error).split())[:500]
        raise ModelError(f"the tokenizer in {folder} cannot be used: {type(error).__name__}: {text}") from error
    return tokenizer, num_tokens


TASK: Final[Callable[[Path], PromptTokenizer]] = load_tokenizer
