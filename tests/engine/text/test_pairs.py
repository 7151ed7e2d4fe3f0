"""Pairs of texts become the tokens and types that transformers makes of them, whole and cut."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.classifiers import open_tokenizer, write_served_classifier
from transformers import PreTrainedTokenizerBase

from conveyor_engine.errors import ErrorCode, InvalidRequest
from conveyor_engine.text.pairs import PairEncoder, split_room
from conveyor_engine.text.tokenizer import Side, Tokenizer, Truncation

LONG = 512
TEXTS = st.text(st.sampled_from("the quick fox 日本é🙂"), max_size=60)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    write_served_classifier("bert", folder)
    return folder


@pytest.fixture(scope="module")
def ours(directory: Path) -> Tokenizer:
    return Tokenizer(directory)


@pytest.fixture(scope="module")
def theirs(directory: Path) -> PreTrainedTokenizerBase:
    return open_tokenizer(directory)


def test_a_pair_is_as_transformers_encodes_it(ours: Tokenizer, theirs: PreTrainedTokenizerBase) -> None:
    @given(TEXTS, TEXTS)
    def check(first: str, second: str) -> None:
        pair = PairEncoder(ours, first, LONG, param="query").encode(second, param="documents[0]")
        expected = theirs([first], [second])
        assert ([pair.token_ids], [pair.token_types]) == (expected["input_ids"], expected["token_type_ids"])

    check()


def test_a_pair_is_cut_as_transformers_cuts_it(ours: Tokenizer, theirs: PreTrainedTokenizerBase) -> None:
    @given(TEXTS, TEXTS, st.integers(3, 40), st.sampled_from(["left", "right"]))
    def check(first: str, second: str, most: int, side: Side) -> None:
        lengths = [len(theirs(text, add_special_tokens=False)["input_ids"]) for text in (first, second)]
        if min(lengths) > most - 3:
            return  # which of two texts that are both too long alone gets the odd token is not told by their ends
        theirs.truncation_side = side
        expected = theirs([first], [second], truncation="longest_first", max_length=most)
        pair = PairEncoder(ours, first, LONG, param="query", truncation=Truncation(most, side)).encode(
            second, param="d"
        )
        assert ([pair.token_ids], [pair.token_types]) == (expected["input_ids"], expected["token_type_ids"])

    check()


@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 60))
def test_what_is_left_of_both_texts_fills_the_room(first: int, second: int, room: int) -> None:
    if first + second <= room:
        return
    left = split_room(room, first, second)
    assert sum(left) == room
    assert left[0] <= first
    assert left[1] <= second


def test_a_pair_that_is_too_long_is_refused_by_the_name_of_its_field(ours: Tokenizer) -> None:
    for second in ("the fox " * 40, "x" * 100_000):
        with pytest.raises(InvalidRequest) as caught:
            PairEncoder(ours, "the fox", 40, param="query").encode(second, param="documents[3]")
        assert (caught.value.param, caught.value.code) == ("documents[3]", ErrorCode.CONTEXT_LENGTH_EXCEEDED)
    with pytest.raises(InvalidRequest) as caught:
        PairEncoder(ours, "the fox " * 1000, 40, param="query")
    assert caught.value.param == "query"


def test_a_second_text_may_be_read_in_part(ours: Tokenizer, theirs: PreTrainedTokenizerBase) -> None:
    pair = PairEncoder(ours, "fox", LONG, param="q").encode("the quick fox " * 1000, param="d", max_second_tokens=4)
    second = theirs("the quick fox " * 2, add_special_tokens=False)["input_ids"][:4]
    first = theirs("fox", add_special_tokens=False)["input_ids"]
    assert pair.token_ids[-5:-1] == second
    assert len(pair.token_ids) == len(first) + 4 + 3


def test_room_for_less_than_the_special_tokens_is_refused(ours: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="3 special tokens, more than the limit of 2"):
        PairEncoder(ours, "a", LONG, param="query", truncation=Truncation(2, "right"))
