"""Limits for a client's Lark grammar that can be checked before it is compiled. Pure. Used by `grammar`.

The library's compiler recurses once for each rule that leads to another rule, and its memory doubles with each
intersection of terminals.
"""

import re
from typing import Final

RULES_MAX: Final = 1024  # the compiler overflows 8 MiB of stack with a chain of 2,673 rules
NESTING_MAX: Final = 128  # brackets
INTERSECTIONS_MAX: Final = 16  # of a whole grammar, because terminals may refer to each other; negations count too
_TEXT: Final = r'"(?:\\.|[^"\\\n])*"'
_OPAQUE = re.compile(rf"//[^\n]*|{_TEXT}|/(?:\\.|[^/\\\n])+/")
_RULE = re.compile(r"^\s*[?!]*[A-Za-z_]\w*\s*(?:[\[{(][^\n:]*)?:", re.MULTILINE)


class GrammarTooLarge(Exception):
    """The grammar exceeds a limit."""


def check_lark(text: str) -> None:
    """Raise GrammarTooLarge if the grammar exceeds a limit."""
    bare = _OPAQUE.sub("", text)
    if (number := len(_RULE.findall(bare))) > RULES_MAX:
        raise GrammarTooLarge(f"it has {number} rules, more than {RULES_MAX}")
    if (number := bare.count("&") + bare.count("~")) > INTERSECTIONS_MAX:
        raise GrammarTooLarge(f"it has {number} intersections of terminals, more than {INTERSECTIONS_MAX}")
    depth = 0
    for character in bare:
        depth += (character in "([{") - (character in ")]}")
        if depth > NESTING_MAX:
            raise GrammarTooLarge(f"its brackets are nested more than {NESTING_MAX} levels deep")
