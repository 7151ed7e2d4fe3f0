"""Prepares a client's JSON schema for the library. Pure. Used by `text.json_grammar`."""

from collections.abc import Callable, Sequence
from typing import Any

from conveyor_engine.text.schema.document import Document, too_deep
from conveyor_engine.text.schema.problems import Relaxed
from conveyor_engine.text.schema.prune import check_depth, prune
from conveyor_engine.text.schema.rewrite import Rewriter


class Prepared:
    """A schema that the library follows. An answer that fits it fits the client's, except for what is in `relaxed`."""

    def __init__(self, schema: Any, rewriter: Rewriter) -> None:
        self.schema = schema
        self._rewriter = rewriter

    @property
    def relaxed(self) -> list[Relaxed]:
        """The keywords that an answer might not follow."""
        return list(self._rewriter.relaxed)

    def relax(self, keyword: str, pointer: str) -> None:
        """Note one more keyword that an answer might not follow."""
        self._rewriter.relaxed[Relaxed(keyword, pointer)] = None

    def place_of(self, schema: Any, otherwise: str) -> str:
        """Return the JSON pointer of the client's schema from which a part of this one was made."""
        return self._rewriter.places.get(id(schema), otherwise)


def prepare(schema: Any, are_disjoint: Callable[[Sequence[str]], bool], *, closed: bool = True) -> Prepared:
    """Rewrite the schema. Raises SchemaError if the schema is wrong, and NoValueFits if no value fits it.

    are_disjoint: returns whether no text matches two of the patterns, which are in the library's syntax.
    closed: an object has no properties but those that the schema names.
    """
    try:
        rewriter = Rewriter(Document(schema), are_disjoint)
        rewritten = rewriter.run(closed=closed)
        pruned = prune(rewritten, lambda each: rewriter.places.get(id(each), "#"))
        check_depth(pruned)
    except RecursionError:
        raise too_deep("#") from None
    return Prepared({} if pruned is True else pruned, rewriter)
