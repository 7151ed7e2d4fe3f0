"""Words of a transcript are those of transformers, for any tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.whisper.tokenization_whisper import _combine_tokens_into_words

from conveyor_engine.tasks.transcribe.serving.words import group_words

CHARACTER = "\u6f22"
TEXTS = (" the", " fox", "es", "ing", ",", ".", " (", ")", ' "', "'", "?", "\u3002", " ", "x")
PIECES = [text.encode() for text in TEXTS]
PIECES += [CHARACTER.encode()[:1], CHARACTER.encode()[1:], CHARACTER.encode()]


class Reader:
    """A tokenizer whose tokens are pieces of text, some of which are parts of a character."""

    eos_token_id, language = len(PIECES), "english"

    def decode(self, tokens: list[int], **_: object) -> str:
        return b"".join(PIECES[token] for token in tokens).decode(errors="replace")


@pytest.mark.parametrize(("code", "name"), [("en", "english"), ("zh", "chinese")])
@given(tokens=st.lists(st.integers(0, len(PIECES) - 1), max_size=30))
def test_words_are_those_of_transformers(code: str, name: str, tokens: list[int]) -> None:
    words, _, indices = _combine_tokens_into_words(Reader(), tokens, name)
    grouped = group_words(tokens, Reader().decode, code)
    assert [(each.text, list(range(each.first, each.end))) for each in grouped] == list(
        zip(words, indices, strict=True)
    )


def test_punctuation_belongs_to_the_word_that_it_touches() -> None:
    tokens = [PIECES.index(piece) for piece in (b" the", b" (", b"x", b"ing", b")", b",", b" fox", b"es", b".")]
    assert [each.text for each in group_words(tokens, Reader().decode, None)] == [" the", " (xing),", " foxes."]
