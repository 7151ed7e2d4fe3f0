"""What the doors that are translated onto chat have in common. Used by `messages` and `responses`."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from conveyor_engine.errors import InvalidRequest


@contextmanager
def in_words_of(words: Mapping[str, str]) -> Iterator[None]:
    """Errors name the client's fields: `words` has chat's names, or parts of them, and for each the client's.

    A name that is a plain word too stands for itself in sentences.
    """
    try:
        yield
    except InvalidRequest as error:
        message, param = str(error), error.param
        for ours, theirs in words.items():
            message = message if ours.isalpha() else message.replace(ours, theirs)
            param = param and param.replace(ours, theirs)
        raise InvalidRequest(message, param=param, code=error.code) from None
