"""Builds the parser of an answer for the needs of its request and its model."""

from collections.abc import Sequence
from functools import partial

import msgspec

from conveyor_engine.text.parsing.formats import CHANNELS, COMMAND, COMMAND_CALLS, FORMATS, build_program
from conveyor_engine.text.parsing.harmony import Harmony
from conveyor_engine.text.parsing.interface import PLAIN_TEXT, CallIds, OutputParser, Part
from conveyor_engine.text.parsing.machine import END, Machine, Program, Reading, Write, read_content, read_until
from conveyor_engine.text.parsing.thinking import GPT_OSS, MARKS, build_thinking
from conveyor_engine.text.parsing.unwrapped import Unwrapped
from conveyor_engine.text.parsing.xml_calls import Strings


class Parsing(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """How the answer to a request is divided into fields."""

    tool_format: str = ""  # the format of tool calls; "": calls are not parsed
    thinking: str = ""  # a key of `MARKS`; "": thinking is not parsed
    has_begun_thinking: bool = False  # whether the prompt ends within the thinking
    strings: Strings = {}  # if the format needs them
    only_one_call: bool = False
    texts: Sequence[str] = ()  # the tools whose calls have a text, `input`, in place of arguments
    input_of: str = ""  # the custom tool that the answer calls: the text is the call's input, without marks
    call_ids: CallIds = "random"
    num_earlier_calls: int = 0  # in the conversation

    @property
    def has_special_tokens(self) -> bool:
        """Return whether marks that are parsed are special tokens, which the detokenizer would otherwise hide."""
        in_calls = bool(self.tool_format) and FORMATS[self.tool_format].has_special_tokens
        return in_calls or (bool(self.thinking) and MARKS[self.thinking].are_special_tokens)


NO_PARSING = Parsing()


def build_parser(parsing: Parsing) -> OutputParser:
    """Build the parser of one choice."""
    if not parsing.tool_format and not parsing.thinking:
        return PLAIN_TEXT
    parser: OutputParser = Machine(_build_program(parsing))
    parser = _FirstCall(parser) if parsing.only_one_call else parser
    return Unwrapped(parser, frozenset(parsing.texts)) if parsing.texts else parser


def _build_program(parsing: Parsing) -> Program:
    if parsing.tool_format == CHANNELS or (parsing.thinking == GPT_OSS and not parsing.tool_format):
        return Harmony("reasoning" if parsing.thinking else "content", has_tools=bool(parsing.tool_format)).read
    program: Program
    if parsing.input_of:
        program = partial(_read_input, parsing.input_of)
    elif parsing.tool_format:
        program = build_program(parsing.tool_format, parsing.strings)
    else:
        program = COMMAND_CALLS.read_text if parsing.thinking == COMMAND else read_content
    if parsing.thinking:
        return build_thinking(MARKS[parsing.thinking], has_begun=parsing.has_begun_thinking, rest=program)
    return program


def _read_input(tool: str, write: Write, first: str | None) -> Reading[None]:
    """Read all text as the input of a call, unless the answer ended before it."""
    if first != END:
        write("tool_call", tool)
        yield from read_until(partial(write, "arguments"), (), first)


class _FirstCall:
    """Drops all calls except the first one."""

    def __init__(self, parser: OutputParser) -> None:
        self._parser = parser
        self._num_calls = 0

    def feed(self, text: str) -> Sequence[Part]:
        return [part for part in self._parser.feed(text) if self._is_wanted(part)]

    def finish(self) -> Sequence[Part]:
        return [part for part in self._parser.finish() if self._is_wanted(part)]

    def _is_wanted(self, part: Part) -> bool:
        self._num_calls += part[0] == "tool_call"
        return self._num_calls <= 1 or part[0] not in ("tool_call", "arguments")
