from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.chat_model import write_tokenizer

from conveyor_engine.text.detokenizer import Detokenizer
from conveyor_engine.text.stop_strings import StopStrings
from conveyor_engine.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return Tokenizer(folder)


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """One token per byte, so that any text can be cut anywhere."""
    ids = byte_ids(tokenizer)
    return [ids[byte] for byte in text.encode()]


@cache
def byte_ids(tokenizer: Tokenizer) -> dict[int, int]:
    """The token of each byte."""
    pieces = {i: tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)}
    return {piece[0]: i for i, piece in pieces.items() if len(piece) == 1}


def show(tokenizer: Tokenizer, text: str, *stop: str, min_tokens: int = 0) -> tuple[list[str], bool]:
    """The pieces shown when the text comes byte by byte, and whether a stop string ended it."""
    detokenizer = Detokenizer(tokenizer, [], StopStrings(stop), min_tokens)
    pieces = []
    for token_id in ids_of(tokenizer, text):
        piece = detokenizer.push([token_id])
        pieces.append(piece.text)
        if piece.stopped:
            return pieces, True
    return [*pieces, detokenizer.finish().text], False


def test_text_before_a_stop_string_is_shown_and_nothing_after(tokenizer: Tokenizer) -> None:
    pieces, stopped = show(tokenizer, "one END two", "END")
    assert ("".join(pieces), stopped) == ("one ", True)


def test_a_stop_string_that_is_shown_is_not_held_back(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, [], StopStrings(["END"]), shows_stop=True)
    pieces = [detokenizer.push([token_id]) for token_id in ids_of(tokenizer, "aENbEND")]
    assert [piece.text for piece in pieces] == list("aENbEND")
    assert [piece.stopped for piece in pieces] == [False] * 6 + [True]
    together = Detokenizer(tokenizer, [], StopStrings(["END"]), shows_stop=True)
    assert together.push(ids_of(tokenizer, "one END two")).text == "one END"


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_are_shown_if_they_are_wanted(tokenizer: Tokenizer, skip: bool) -> None:
    detokenizer = Detokenizer(tokenizer, [1, 2], StopStrings(["end|>b"]), skip_special_tokens=skip)
    piece = detokenizer.push([*ids_of(tokenizer, "a"), 0, *ids_of(tokenizer, "b")])
    assert (piece.text, piece.stopped) == (("ab", False) if skip else ("a<|", True))


def test_a_beginning_of_a_stop_string_is_held_back_until_it_is_none(tokenizer: Tokenizer) -> None:
    pieces, stopped = show(tokenizer, "aENb", "END")
    assert (pieces, stopped) == (["a", "", "", "ENb", ""], False)


def test_what_was_held_back_is_shown_at_the_end(tokenizer: Tokenizer) -> None:
    assert show(tokenizer, "aEN", "END") == (["a", "", "", "EN"], False)


def test_the_earliest_of_several_stop_strings_wins(tokenizer: Tokenizer) -> None:
    assert "".join(show(tokenizer, "xabcy", "bc", "abcd", "y")[0]) == "xa"


def test_a_stop_string_within_the_first_tokens_does_not_count(tokenizer: Tokenizer) -> None:
    pieces, stopped = show(tokenizer, "END and END", "END", min_tokens=3)
    assert ("".join(pieces), stopped) == ("END and ", True)


def test_an_unfinished_character_at_the_end_is_replaced(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, [])
    half = ids_of(tokenizer, "aé")[:-1]
    assert detokenizer.push(half).text == "a"
    assert detokenizer.finish().text == "\ufffd"


def test_a_replacement_character_of_the_models_own_is_shown(tokenizer: Tokenizer) -> None:
    pieces, _ = show(tokenizer, "a\ufffdb\ufffd")
    assert "".join(pieces) == "a\ufffdb\ufffd"


def test_tokens_are_counted_when_their_text_is_shown(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, [], StopStrings(["xyz"]))
    starts = [detokenizer.push([i]).token_starts for i in ids_of(tokenizer, "axyb")]
    assert starts == [[0], [], [], [1, 2, 3]]


def test_all_at_once_is_cut_as_byte_by_byte(tokenizer: Tokenizer) -> None:
    piece = Detokenizer(tokenizer, [], StopStrings(["END"])).push(ids_of(tokenizer, "one END two"))
    assert (piece.text, piece.stopped, piece.token_starts) == ("one ", True, [0, 1, 2, 3])


@settings(deadline=None)
@given(st.text("abé🙂", max_size=20), st.lists(st.text("abé🙂", min_size=1, max_size=3), max_size=3), st.data())
def test_any_cutting_of_a_text_shows_what_comes_before_the_first_stop_string(
    tokenizer: Tokenizer, text: str, stop: list[str], data: st.DataObject
) -> None:
    detokenizer = Detokenizer(tokenizer, [], StopStrings(stop))
    ids = ids_of(tokenizer, text)
    shown, stopped = "", False
    while ids and not stopped:
        count = data.draw(st.integers(1, len(ids)))
        piece = detokenizer.push(ids[:count])
        ids, shown, stopped = ids[count:], shown + piece.text, piece.stopped
    if not stopped:
        shown += detokenizer.finish().text
    ends = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    assert stopped == bool(ends)
    if not ends:
        assert shown == text
    else:
        first_end = min(ends)[0]  # the string that is complete first ends the answer
        assert shown == text[: min(start for end, start in ends if end == first_end)]


def divide(tokenizer: Tokenizer, text: str, choices: list[int]) -> list[int]:
    """Tokens that have the bytes of the text, as a model may choose them: any that fit, also across characters."""
    pieces = [(tokenizer.token_bytes(i), i) for i in range(tokenizer.vocab_size)]
    data, ids = text.encode(), list[int]()
    for choice in choices * len(data):
        fitting = [
            (piece, i) for piece, i in pieces if piece and data.startswith(piece) and not piece.startswith(b"<|")
        ]
        if not fitting:
            break
        piece, token_id = fitting[choice % len(fitting)]
        ids.append(token_id)
        data = data[len(piece) :]
    assert not data
    return ids


@settings(max_examples=200)
@given(
    st.text("日本語のテキスト本誨🙂éa\u6665\ue8aa", min_size=1, max_size=12),
    st.lists(st.integers(0, 5), min_size=1, max_size=9),
)
def test_a_text_is_whole_however_its_bytes_are_divided(tokenizer: Tokenizer, text: str, choices: list[int]) -> None:
    stream = tokenizer.decode_stream([])
    pieces = [stream.push(token_id) for token_id in divide(tokenizer, text, choices)]
    assert "".join([*pieces, stream.finish()]) == text


@pytest.mark.parametrize("data", [b"\xe6\x80\xa5\xe6\x89\xac", b"\xf0\x9f\xa3\xac\xe8\x9c\xa8"])
def test_a_token_that_ends_a_character_and_begins_another_breaks_neither(tokenizer: Tokenizer, data: bytes) -> None:
    joint = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    straddling = [
        pair for pair in joint if len(pair) == 2 and pair in data and pair[0] & 0xC0 == 0x80 and pair[1] >= 0xC0
    ]
    assert straddling, "the tokenizer has learnt one"
    pair = straddling[0]
    before, _, after = data.partition(pair)
    ids = [*(joint[bytes([byte])] for byte in before), joint[pair], *(joint[bytes([byte])] for byte in after)]
    stream = tokenizer.decode_stream([])
    assert "".join([*map(stream.push, ids), stream.finish()]) == data.decode()
