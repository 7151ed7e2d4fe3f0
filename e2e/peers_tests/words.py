"""Tokenizers that give the tests' texts the tokens that the tests expect of a real model's tokenizer. Used by `models`.

The test files for models that embed, rank or classify name the token ids of a text. Each tokenizer here has the pieces
of that text at those ids. Most other words of the tests are one piece each, and every printable ASCII character is one.
The tokenizer takes the longest piece that fits, as WordPiece does.
"""

import string
from collections.abc import Iterator, Mapping
from typing import Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

_SPACE: Final = "▁"
_UNKNOWN: Final = "<unk>"
_TEXTS: Final = (
    "user: The cat sat on the mat. assistant: A feline was resting on a rug. Stars twinkle brightly in the night sky.",
    "Hello my name is What the capital of France? Germany Brazil Paris Berlin Brasilia cross-encoder models are neat",
    "The best thing about vLLM is that it supports many different models. The chef prepared a delicious meal.",
    "This product was excellent and exceeded my expectations system you are a helpful assistant You are ping pong test",
)
# XLM-R's pieces, which vLLM's online tests of embed, token_embed and scoring name.
E5_PIECES: Final = {
    "▁The": 581, "▁best": 2965, "▁thing": 13580, "▁about": 1672, "▁v": 81, "LL": 23708, "M": 594, "▁is": 83,
    "▁that": 450, "▁it": 442, "▁support": 8060, "s": 7, "▁many": 5941, "▁different": 12921, "▁models": 115774,
}  # fmt: skip
RERANKER_PIECES: Final = {
    "▁This": 3293, "▁product": 12996, "▁was": 509, "▁excellent": 40881, "▁and": 136, "▁exceed": 204839, "ed": 297,
    "▁my": 759, "▁expectations": 202702,
}  # fmt: skip
# Qwen's pieces, which test_online.py of classify names.
_QWEN_PIECES: Final = {
    "This": 1986, "▁product": 1985, "▁was": 572, "▁excellent": 9073, "▁and": 323, "▁exceeded": 33808, "▁my": 847,
    "▁expectations": 16665,
}  # fmt: skip
_SPLIT: Final = ("feline", "resting", "twinkle", "brightly", "supports", "vLLM", "exceeded")  # in two pieces or more
_PARTS: Final = ("fel", "ine", "rest", "ing", "twin", "kle", "bright", "ly")
_QWEN_SPLIT: Final = ("feline", "twinkle")


def make_xlmr(named: Mapping[str, int]) -> Tokenizer:
    """Make a tokenizer like XLM-R's: a text is between `<s>` and `</s>`, and two `</s>` are between two texts."""
    first, last = ("<s>", 0), ("</s>", 2)
    pieces = {"<s>": 0, "<pad>": 1, "</s>": 2, _UNKNOWN: 3, **named}
    words = {_SPACE + word for word in _find_words() if word not in _SPLIT}
    tokenizer = _make(pieces, [*words, *(_SPACE + part for part in _PARTS[::2]), *_PARTS[1::2]])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme="always")
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "<pad>", "</s>", _UNKNOWN)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[first, last]
    )
    return tokenizer


def make_qwen() -> Tokenizer:
    """Make a tokenizer like Qwen's: no special tokens around a text, and a line's end is a piece."""
    words = [word for word in _find_words() if word not in _QWEN_SPLIT]
    parts = ["fel", "ine", "twin", "kle"]
    tokenizer = _make({_UNKNOWN: 0} | _QWEN_PIECES, [*words, *(_SPACE + word for word in (*words, *parts)), *parts])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme="never")
    ends = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ends])
    return tokenizer


def _make(pieces: dict[str, int], others: list[str]) -> Tokenizer:
    """Make a tokenizer that has `pieces` at their ids, and the others at the lowest free ids."""
    vocabulary = dict(pieces)
    free = _find_free(set(pieces.values()))
    characters = [*string.printable, _SPACE]
    for piece in dict.fromkeys([*sorted(others), *characters]):
        if piece not in vocabulary:
            vocabulary[piece] = next(free)
    model = models.WordPiece(
        vocab=vocabulary, unk_token=_UNKNOWN, continuing_subword_prefix="", max_input_chars_per_word=100_000
    )
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Metaspace(replacement=_SPACE, prepend_scheme="always")
    return tokenizer


def _find_free(taken: set[int]) -> Iterator[int]:
    return (number for number in range(4, 2**31) if number not in taken)


def _find_words() -> list[str]:
    text = " ".join(_TEXTS)
    return sorted({word.strip(".,?:") for word in text.split()})
