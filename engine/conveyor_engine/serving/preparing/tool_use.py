"""How a request uses tools: what the model sees, what it may call, and how the client knows what it calls.

Used by the schemas of requests, and by `prompts` and the task that generates text. Pure.
"""

import json
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec
from pydantic_core import PydanticCustomError

from conveyor_engine.errors import InvalidRequest
from conveyor_engine.serving.preparing.schemas import Object
from conveyor_engine.serving.preparing.tools import (
    TOOLS_MAX,
    AllowedToolsChoice,
    CustomTool,
    Syntax,
    Tool,
    ToolChoice,
    get_name,
)
from conveyor_engine.text.grammar import NO_GRAMMAR, BuiltGrammar, build_grammar, check_written, follow_schema
from conveyor_engine.text.json_grammar import JsonSchema
from conveyor_engine.text.parsing.build import NO_PARSING, Parsing
from conveyor_engine.text.parsing.call_syntax import ChannelSyntax, build_form_in_channels, build_input_in_channels
from conveyor_engine.text.parsing.dialect import Dialect
from conveyor_engine.text.parsing.formats import FORMATS, build_call_or_form, find_forced
from conveyor_engine.text.schema.arguments import find_strings
from conveyor_engine.text.tags import FindToken

SCHEMA_CHARACTERS_MAX = 64 * 1024
SCHEMAS_CHARACTERS_MAX = 256 * 1024  # for all tools together


class CalledAs(msgspec.Struct, frozen=True, array_like=True):
    """How the client knows a function of the prompt that is not a function of the request."""

    name: str
    namespace: str | None = None
    is_custom: bool = False  # a call has a text in place of arguments


class Offered(NamedTuple):
    """A function in the prompt."""

    tool: Tool
    place: str  # of its schema in the request, in the chat API's words
    called_as: CalledAs | None = None  # None: as what it is
    lark: str = ""  # the grammar of a custom tool's input, if it is in Lark

    @property
    def name(self) -> str:
        return self.tool.function.name

    @property
    def names(self) -> set[str]:
        """Its name in the prompt, and the client's name for it."""
        return {self.name, self.called_as.name if self.called_as else self.name}


def offer(tools: Sequence[Object] | None) -> list[Offered]:
    """Return the functions for a chat request's tools. Those of other kinds are left out."""
    offered = []
    for number, tool in enumerate(tools or ()):
        place = f"tools[{number}].function.parameters"
        if isinstance(tool, Tool):
            offered.append(Offered(tool, place))
        elif isinstance(tool, CustomTool):
            called_as, place = CalledAs(tool.custom.name, is_custom=True), f"tools[{number}].custom.format"
            offered.append(Offered(tool.custom.as_function(), place, called_as, find_lark(tool.custom.syntax)))
    return offered


def find_lark(syntax: Syntax | None) -> str:
    """Return a custom tool's grammar in Lark; "" if it has none."""
    return syntax.definition if syntax is not None and syntax.syntax == "lark" else ""


class Choice(NamedTuple):
    """Which tools the model may call, and whether it must."""

    mode: Literal["none", "auto", "required"]
    names: Sequence[str] | None = None  # None: all
    is_list: bool = False  # whether the names are a list of tools, of which several may be called

    @classmethod
    def of(cls, choice: ToolChoice) -> "Choice":
        """Return the choice of a chat request."""
        if choice is None or isinstance(choice, str):
            return cls(choice or "auto")
        if isinstance(choice, AllowedToolsChoice):
            return cls(choice.allowed_tools.mode, [get_name(each) for each in choice.allowed_tools.tools], True)
        return cls("required", [get_name(choice)])


class ToolUse(NamedTuple):
    """How a request uses tools."""

    tools: Sequence[Offered]  # the functions that the chat template shows to the model
    choice: Literal["none", "auto", "required"]
    callable_tools: Sequence[Offered]  # the functions that the model may call
    only_one_call: bool

    @classmethod
    def of(cls, offered: Sequence[Offered], choice: Choice, parallel: bool | None) -> "ToolUse":
        """Make a ToolUse from a request's fields. `parallel` is the field `parallel_tool_calls`.

        Raises PydanticCustomError if the fields conflict. The type of the error is the name of the wrong field.
        """
        if len(offered) > TOOLS_MAX:
            raise PydanticCustomError(
                "tools", f"tools may have at most {TOOLS_MAX} tools, those of namespaces included"
            )
        if len({each.name for each in offered}) < len(offered):
            raise PydanticCustomError("tools", "tools must have different names")
        if choice.mode == "required" and not offered:
            raise PydanticCustomError("tool_choice", "tool_choice can only be required if there are tools")
        if not offered or choice.mode == "none":
            return cls((), "none", (), False)
        chosen = offered if choice.names is None else _choose(offered, choice.names)
        is_named = choice.names is not None and not choice.is_list
        if choice.names and is_named and len(chosen) > 1:
            chosen = [_find_one(chosen, choice.names[0])]
        shown = chosen if choice.mode == "auto" else offered  # nothing else keeps the model from calling the others
        return cls(shown, choice.mode, chosen, is_named or parallel is False)

    def for_template(self) -> list[dict[str, Any]] | None:
        """Return the tools as chat templates receive them; None if the model may call none."""
        return [each.tool.for_template() for each in self.tools] or None

    def check_size(self) -> None:
        """Raise InvalidRequest if the tools' schemas are too large."""
        sizes = [len(json.dumps(each.tool.function.parameters or {})) for each in self.tools]
        for each, size in zip(self.tools, sizes, strict=True):
            if size > SCHEMA_CHARACTERS_MAX:
                most = f"has {size} characters, more than {SCHEMA_CHARACTERS_MAX}; shorten the schema"
                raise InvalidRequest(f"{each.place} {most}", param=each.place)
        if sum(sizes) > SCHEMAS_CHARACTERS_MAX:
            message = f"the schemas in tools have {sum(sizes)} characters together, more than {SCHEMAS_CHARACTERS_MAX}"
            raise InvalidRequest(f"{message}; send fewer tools, or shorten their schemas", param="tools")

    @property
    def followed(self) -> Offered | None:
        """The tool that must be called, if its input follows a grammar in Lark: the answer is then the input alone.

        None if several tools may be called, because such an answer does not show which one it calls.
        """
        if self.choice != "required" or len(self.callable_tools) != 1 or not self.callable_tools[0].lark:
            return None
        return self.callable_tools[0]

    @property
    def called_as(self) -> dict[str, CalledAs]:
        """How the client knows the functions that are not its own."""
        return {each.name: each.called_as for each in self.tools if each.called_as}

    def find_parsing(self, dialect: Dialect, num_earlier_calls: int = 0) -> Parsing:
        """Return how to parse the answer's tool calls. Raises InvalidRequest if this model's calls cannot be parsed.

        num_earlier_calls: the number of calls in the conversation.
        """
        if self.choice == "none":
            return NO_PARSING
        if self.choice == "auto" and dialect.tool_format is None:
            raise InvalidRequest(
                f"{dialect.why_no_tools}; send tool_choice `required`, a tool's name or `none`, or have the engine's "
                "tool_parser set (engine.toolParser of the service)",
                param="tool_choice",
            )
        name = find_forced(dialect.tool_format)[0] if self.choice == "required" else dialect.tool_format
        assert name
        schemas = {each.name: each.tool.function.schema_of_arguments for each in self.callable_tools}
        needs_schemas = FORMATS[name].needs_schemas
        return Parsing(
            tool_format=name,
            strings={tool: find_strings(schema) for tool, schema in schemas.items()} if needs_schemas else {},
            only_one_call=self.only_one_call,
            call_ids=FORMATS[dialect.tool_format].call_ids if dialect.tool_format else "random",
            num_earlier_calls=num_earlier_calls,
            texts=[name for name, called in self.called_as.items() if called.is_custom and not self.followed],
            input_of=self.followed.name if self.followed else "",
        )

    def build_grammar(self, dialect: Dialect, find_token: FindToken) -> BuiltGrammar:
        """Return the grammar for an answer that must call a tool; an empty one if a call is not required.

        Raises InvalidRequest.
        """
        if self.choice != "required":
            return NO_GRAMMAR
        if self.followed:
            return _follow_lark(self.followed, dialect, find_token)
        schemas = [_follow(each) for each in self.callable_tools]
        named = [(each.name, schema) for each, schema in zip(self.callable_tools, schemas, strict=True)]
        _, shape = find_forced(dialect.tool_format)
        text = shape.build_grammar(named, find_token, only_one=self.only_one_call)
        relaxed = [each for schema in schemas for each in schema.relaxed]
        return BuiltGrammar(build_grammar("lark", text, "tools").text, relaxed)

    def add_calls(
        self, grammar: BuiltGrammar, dialect: Dialect, find_token: FindToken, *, has_channels: bool = False
    ) -> BuiltGrammar:
        """Return the grammar for an answer that follows `grammar` or calls tools, if the model may choose.

        has_channels: whether the model writes the answer in channels.
        """
        tool_format = dialect.tool_format if self.choice == "auto" else None
        names = [each.name for each in self.callable_tools] if tool_format else []
        if has_channels:
            return add_channels(grammar, names, find_token)
        if not tool_format:
            return grammar
        text = build_call_or_form(tool_format, names, grammar.text, find_token)
        return grammar._replace(text=check_written(text, "tools"))


def add_channels(form: BuiltGrammar, tools: Sequence[str], find_token: FindToken) -> BuiltGrammar:
    """Return the grammar for an answer of a model with channels: its text follows `form`, or it calls a tool."""
    return form._replace(text=check_written(build_form_in_channels(form.text, tools, find_token), "tools"))


def _follow(offered: Offered) -> JsonSchema:
    """Return the schema of the function's arguments as the library follows it. Raises InvalidRequest."""
    function = offered.tool.function
    return follow_schema(function.schema_of_arguments, offered.place, strict=function.strict is True)


def _follow_lark(offered: Offered, dialect: Dialect, find_token: FindToken) -> BuiltGrammar:
    """Return the grammar for an answer that is the tool's input. Raises InvalidRequest."""
    form = build_grammar("grammar", offered.lark, offered.place)
    if not isinstance(find_forced(dialect.tool_format)[1], ChannelSyntax):
        return form
    return BuiltGrammar(check_written(build_input_in_channels(form.text, offered.name, find_token), "tools"))


def _choose(offered: Sequence[Offered], names: Sequence[str]) -> list[Offered]:
    """Return the functions with these names, in their order. Raises PydanticCustomError if a name is unknown."""
    chosen = [each for each in offered if each.names & set(names)]
    if not set(names) <= set[str]().union(*(each.names for each in chosen)):
        raise PydanticCustomError("tool_choice", "tool_choice must name one of tools")
    return chosen


def _find_one(chosen: Sequence[Offered], name: str) -> Offered:
    """Return the function that has this name in the prompt. Raises PydanticCustomError if none has."""
    if (found := next((each for each in chosen if each.name == name), None)) is None:
        names = ", ".join(each.name for each in chosen[:4])
        raise PydanticCustomError("tool_choice", f"tool_choice must name one tool; use one of these names: {names}")
    return found
