"""Rewrites the keywords of texts: `pattern` and `format`. Pure. Used by `rewrite`.

A pattern is in the syntax of ECMAScript, and may have what Python's `re` has beyond it. The library's syntax is that of
Rust's `regex`, in which `\\d` and `\\w` are ASCII here.
"""

import re
from collections.abc import Iterable
from typing import Final, NamedTuple

from conveyor_engine.text.schema.formats import PATTERNS

_TOKEN: Final = re.compile(
    r"\\u\{(?P<braced>[0-9a-fA-F]{1,6})\}|\\u(?P<pair>[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})"
    r"|\\u(?P<unicode>[0-9a-fA-F]{4})|\\x(?P<hexadecimal>[0-9a-fA-F]{2})|\\c(?P<control>[A-Za-z])"
    r"|\\(?P<property>[pP]\{[^}]*\})|\\k<(?P<name>[^>]*)>|\\(?P<number>[1-9][0-9]*)|\\(?P<escaped>.)"
    r"|(?P<around>\(\?(?:[=!]|<[=!]))|(?P<group>\(\?(?:P?<[^>=!]*>|:|>|[a-zA-Z-]+:)|\()"
    r"|(?P<count>\{[0-9]+(?:,[0-9]*)?\})|(?P<other>.)",
    re.DOTALL,
)
_NOT_LINE_ENDS: Final = r"[^\n\r\x{2028}\x{2029}]"
# llguidance 1.9.1 allows `\\"` and `\\\\` for a set of characters that has all control characters, even if it has no
# quotation mark and no backslash. So no set has the character 0, which no text needs.
_NUL: Final = r"\x{0}"
_NO_NUL: Final = r"\x{1}"
_KEPT: Final = frozenset("dDwWsSnrtvf")  # escapes with the same meaning in both
_ENDS: Final = {"A": "^", "Z": "$", "z": "$"}
_ANYTHING: Final = r"(?s:.*)"
_AHEAD_MAX: Final = 16  # look-aheads of one pattern that become patterns of their own
_AHEAD: Final = re.compile(r"\^\(\?([=!])")
_WHOLE_CLASS: Final = re.compile(r"\^?\]")
_CLASSES: Final = tuple(f"\\{letter}" for letter in "dDwWsS")


class Pattern(NamedTuple):
    """Expressions that a text must all match, in the library's syntax."""

    expressions: tuple[str, ...]
    is_exact: bool  # False: some texts that match all of them do not match the client's pattern


def read_pattern(pattern: str) -> Pattern:
    """Return the pattern in the library's syntax. What the library has not is left out, so more texts match."""
    if pattern in PATTERNS:
        return Pattern((PATTERNS[pattern],), True)
    ahead, rest = _split_ahead(pattern)
    writers = [_Writer() for _ in range(len(ahead) + 1)]
    texts = [writer.write(each) for writer, each in zip(writers, [*ahead, rest], strict=True)]
    return Pattern(tuple(texts), all(writer.is_exact for writer in writers))


def _split_ahead(pattern: str) -> tuple[list[str], str]:
    """Split off the look-aheads with which a pattern begins; each becomes a pattern of its own."""
    found: list[str] = []
    while len(found) < _AHEAD_MAX and (match := _AHEAD.match(pattern)):
        end = _find_end(pattern, match.end())
        inner = pattern[match.end() : end]
        if end < 0 or ("|" in pattern[end:] and not _is_one(pattern[end + 1 :])):
            break
        if match[1] == "=":
            found.append(f"^(?:{inner})")
        elif (only := re.fullmatch(r"\^?\[((?:[^\]\\^]|\\.)(?:[^\]\\]|\\.)*)\]([*+]?)(\$?)", inner)) is not None:
            if only[2] and only[3]:  # not all characters are of the class
                found.append(f"[^{only[1]}]" + ("|^$" if only[2] == "+" else ""))
            elif not only[2] and not only[3]:  # the first character is not of the class
                found.append(f"^(?:$|[^{only[1]}])")
            else:
                break
        else:
            break
        pattern = "^" + pattern[end + 1 :]
    return found, pattern


def _is_one(pattern: str) -> bool:
    """Return whether no `|` of the pattern is outside of brackets."""
    depth, is_class = 0, False
    for token in _TOKEN.finditer(pattern):
        text = token[0]
        is_class = text == "[" or (is_class and text != "]")
        depth += 0 if is_class else bool(token["group"] or token["around"]) - (text == ")")
        if text == "|" and depth == 0 and not is_class:
            return False
    return True


def _find_end(pattern: str, start: int) -> int:
    """Return the place of the bracket that closes the group which begins before `start`; -1 if there is none."""
    depth, is_class = 1, False
    for token in _TOKEN.finditer(pattern, start):
        text = token[0]
        if is_class:
            is_class = text != "]"
        elif text == "[":
            is_class = True
        else:
            depth += bool(token["group"] or token["around"]) - (text == ")")
        if depth == 0:
            return token.start()
    return -1


class _Writer:
    """Writes one expression."""

    def __init__(self) -> None:
        self.is_exact = True

    def write(self, pattern: str) -> str:
        written: list[str] = []
        class_at, skip_to = -1, 0
        for token in _TOKEN.finditer(pattern):
            if token.start() < skip_to:
                continue
            if class_at >= 0:
                is_end = token[0] == "]" and token.start() > class_at
                written.append("]" if is_end else self._in_class(token, pattern))
                class_at = -1 if is_end else class_at
            elif token["around"]:
                skip_to = _find_end(pattern, token.end()) + 1 or len(pattern)
                self.is_exact = False
            elif token[0] == "[":
                if whole := _WHOLE_CLASS.match(pattern, token.end()):  # `[]` matches nothing, `[^]` anything
                    written.append(r"(?s:.)" if whole[0] == "^]" else r"[^\x{0}-\x{10FFFF}]")
                    skip_to = whole.end()
                    continue
                class_at = token.start()
                if pattern.startswith("^", token.end()):
                    skip_to = token.end() + 1
                    written.append(f"[^{_NUL}")
                else:
                    written.append("[")
            else:
                written.append(self._outside(token))
        return "".join(written)

    def _outside(self, token: re.Match[str]) -> str:
        match token.lastgroup:
            case "number" | "name":
                self.is_exact = False
                return _ANYTHING
            case "group":
                self.is_exact = self.is_exact and token[0] != "(?>"
                return "(?:" if token[0] != "(" and re.match(r"\(\?(?:P?<|>)", token[0]) else token[0]
            case "count":
                return token[0]
            case "escaped" if token["escaped"] in "bB":
                self.is_exact = False
                return ""
            case "escaped" if token["escaped"] == "S":
                return r"[^\s\x{FEFF}]"  # for ECMAScript, the byte order mark is white space too
            case "escaped" if token["escaped"] in _ENDS:
                return _ENDS[token["escaped"]]
            case "other" if token[0] == ".":
                return _NOT_LINE_ENDS
            case "other" if token[0] in "{}":
                return "\\" + token[0]
            case "other":
                return token[0]
        return self._character(token)

    def _in_class(self, token: re.Match[str], pattern: str) -> str:
        if token["escaped"] == "b":
            return r"\x{8}"
        if token[0] == "-":  # beside an escape such as \w, it does not stand for a range
            is_beside = pattern.endswith(_CLASSES, 0, token.start()) or pattern.startswith(_CLASSES, token.end())
            return "\\-" if is_beside else "-"
        if token.lastgroup in ("other", "group", "around", "count"):
            return "".join(f"\\{each}" if each in "[&~" else each for each in token[0])
        return self._character(token)

    def _character(self, token: re.Match[str]) -> str:
        match token.lastgroup:
            case "pair":
                high, low = (int(part, 16) for part in token["pair"].split("\\u"))
                return rf"\x{{{0x10000 + ((high - 0xD800) << 10) + low - 0xDC00:X}}}"
            case "braced" | "unicode" | "hexadecimal":
                code = token[token.lastgroup]
                return rf"\x{{{code}}}" if int(code, 16) else _NO_NUL
            case "control":
                return rf"\x{{{ord(token['control']) % 32:X}}}"
            case "property":
                return token[0]
            case "escaped" if token["escaped"] == "0":
                return _NO_NUL
            case "escaped" if token["escaped"] in _KEPT:
                return token[0]
            case "escaped":
                return _quote(token["escaped"])
        return token[0]


def _quote(character: str) -> str:
    return f"\\{character}" if character in r"\.+*?()|[]{}^$#&-~" else character


def only_text(text: str) -> str:
    """Return the pattern of this text alone."""
    return f"^{''.join(map(_write_code, text))}$"


def _write_code(character: str) -> str:
    return f"\\x{{{ord(character):X}}}"


def without(texts: Iterable[str]) -> str:
    """Return the pattern of all texts but these."""
    tree: dict[str, dict] = {}  # type: ignore[type-arg]
    for text in texts:
        node = tree
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}
    return f"^(?:{_others(tree)})$"


def _others(node: dict[str, dict]) -> str:  # type: ignore[type-arg]
    """Return the expression of all texts that do not lead from here to an end. It is never empty."""
    letters = [character for character in node if character]
    first = "".join(map(_write_code, letters))
    branches = [f"[^{_NUL}{first}](?s:.)*" if letters else "(?s:.)+"]
    branches += [f"{_write_code(each)}(?:{_others(node[each])})" for each in letters]
    return "|".join(branches if "" in node else ["", *branches])
