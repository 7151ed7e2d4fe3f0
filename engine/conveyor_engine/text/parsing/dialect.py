"""Finds how a model writes tool calls and thinking, once, from its chat template and the engine's settings."""

from dataclasses import dataclass

from conveyor_engine.config.engine_config import ReasoningParser, ToolParser
from conveyor_engine.text.parsing.formats import find_format
from conveyor_engine.text.parsing.thinking import find_marks

AUTO, NONE = "auto", "none"
_UNKNOWN = "the engine cannot read this model's own tool calls: its chat template has no known format of tool calls"


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one model writes tool calls and thinking."""

    tool_format: str | None = None  # a name of `formats.FORMATS`
    why_no_tools: str = "the engine has no tool parser"  # used if tool_format is None
    thinking: str | None = None  # a name of `thinking.MARKS`


NO_DIALECT = Dialect()


def find_dialect(template: str, tools: ToolParser = "auto", reasoning: ReasoningParser = "auto") -> Dialect:
    """Return the dialect of a model with this chat template. Settings other than "auto" override it."""
    found = find_marks(template) if reasoning == AUTO else reasoning
    thinking = None if found == NONE else found
    tool_format = find_format(template) if tools == AUTO else tools
    if tools == NONE:
        return Dialect(None, "this engine is set to have no tool parser", thinking)
    return Dialect(tool_format, _UNKNOWN, thinking)
