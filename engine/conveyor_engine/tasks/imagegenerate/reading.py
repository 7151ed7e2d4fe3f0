"""Loads the model's tokenizer for prompts, which the workers share. Does not import torch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from conveyor_engine.errors import ModelError
from conveyor_engine.model_files import read_object

CONTEXT_MAX: Final = 4096  # limit on the tokens of a prompt; CLIP has 77
_ERRORS: Final = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError,
    ValueError,
)  # fmt: skip


class PromptTokenizer:
    """Pads and cuts prompts as diffusers' pipeline does."""

    def __init__(self, tokenizer: Any, num_tokens: int) -> None:
        self._tokenizer = tokenizer
        self.num_tokens = num_tokens

    def encode(self, text: str) -> tuple[list[int], int]:
        """Return `num_tokens` tokens, and how many of them are not padding."""
        encoded = self._tokenizer(text, padding="max_length", max_length=self.num_tokens, truncation=True)
        return list(encoded["input_ids"]), sum(encoded["attention_mask"])


def load_tokenizer(directory: Path) -> PromptTokenizer:
    """Load the tokenizer, and check that it pads prompts to its length. Raises ModelError."""
    from transformers import CLIPTokenizer

    folder = directory / "tokenizer"
    positions = read_object(directory / "text_encoder" / "config.json").get("max_position_embeddings", 77)
    try:
        tokenizer = CLIPTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        num_tokens = int(tokenizer.model_max_length)
        if not (isinstance(positions, int) and 2 <= num_tokens <= min(positions, CONTEXT_MAX)):
            raise ModelError(
                f"the tokenizer in {folder} makes prompts of {str(num_tokens)[:40]} tokens, but the text encoder has "
                f"{str(positions)[:40]} positions"
            )
        made = PromptTokenizer(tokenizer, num_tokens)
        if len(made.encode("")[0]) != num_tokens:
            raise ModelError(f"the tokenizer in {folder} does not pad prompts")
    except _ERRORS as error:
        text = " ".join(str(error).split())[:500]
        raise ModelError(f"the tokenizer in {folder} cannot be used: {type(error).__name__}: {text}") from error
    return made


TASK: Final[Callable[[Path], PromptTokenizer]] = load_tokenizer
