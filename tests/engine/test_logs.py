import logging
import re

import pytest

from conveyor_engine.logs import configure_logging, quote, without_secrets


def test_every_line_is_key_value_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    handlers, level = logging.root.handlers[:], logging.root.level
    configure_logging()
    try:
        logging.getLogger("conveyor_engine.x").info("event=ready port=%d", 8000)
        try:
            raise ValueError("a\nb, see https://storage/file?Signature=abc")
        except ValueError:
            logging.getLogger("other").exception("went wrong")
    finally:
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)
    first, second = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"time=\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z level=INFO event=ready port=8000", first)
    assert "Signature" not in second
    assert 'level=ERROR event=log logger=other message="went wrong" traceback="Traceback' in second


@pytest.mark.parametrize(
    ("value", "text"), [("a", "a"), (5, "5"), ("", '""'), ("a b", '"a b"'), ('a"b', '"a\\"b"'), ("a=b", '"a=b"')]
)
def test_values_are_bare_words_or_json_strings(value: object, text: str) -> None:
    assert quote(value) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("from https://storage:443/a/b?X-Amz-Signature=abc&Expires=1: broken", "from https://storage:443/a/b broken"),
        ("'http://user:password@mirror:8080/x'", "'http://mirror:8080/x'"),
        ("HTTP://token@mirror", "HTTP://mirror"),
        ("http://user:p@ss@mirror", "http://mirror"),
        ("is it so? see https://hub/org/tiny, please", "is it so? see https://hub/org/tiny, please"),
    ],
)
def test_urls_are_shown_without_what_may_be_secret(text: str, shown: str) -> None:
    assert without_secrets(text) == shown
