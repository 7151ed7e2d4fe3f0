"""Shared by the APIs whose bodies are converted to chat requests. Used by `messages` and `responses`."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from conveyor_engine.errors import InvalidRequest


@contextmanager
def in_words_of(words: Mapping[str, str]) -> Iterator[None]:
    """Make InvalidRequest errors in the block name the client's fields instead of the chat API's.

    words: maps a field name of the chat API, or a part of such a name, to the client's name. A key of letters only is
    replaced in the error's `param` but not in its message, where it may be an ordinary word.
    """
    try:
        yield
    except InvalidRequest as error:
        message, param = str(error), error.param
        for ours, theirs in words.items():
            message = message if ours.isalpha() else message.replace(ours, theirs)
            param = param and param.replace(ours, theirs)
        raise InvalidRequest(message, param=param, code=error.code) from None
