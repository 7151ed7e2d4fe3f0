"""The fields for tool calls: the tools that a model may call, those that it must call, and earlier calls."""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from conveyor_engine.errors import InvalidRequest
from conveyor_engine.serving.preparing.schemas import Object
from conveyor_engine.text.grammar import build_grammar
from conveyor_engine.text.parsing.build import NO_PARSING, Parsing
from conveyor_engine.text.parsing.dialect import Dialect
from conveyor_engine.text.parsing.formats import FORMATS, Shape, find_forced
from conveyor_engine.text.tags import FindToken

TOOLS_MAX = 128
SCHEMA_CHARACTERS_MAX = 64 * 1024
SCHEMAS_CHARACTERS_MAX = 256 * 1024  # for all tools together
_NAME_PATTERN = r"^[a-zA-Z0-9_.-]{1,64}$"

ToolName = Annotated[str, Field(pattern=_NAME_PATTERN)]


class FunctionDefinition(Object):
    """The definition of a function that the model may call."""

    name: ToolName
    """Up to 64 letters, digits, dots, dashes and underscores."""
    description: str | None = None
    """A description for the model."""
    parameters: dict[str, Any] | None = None
    """The JSON schema of the arguments; default: any object."""
    strict: bool | None = None
    """Has no effect: arguments follow the schema whenever `tool_choice` forces a call."""

    @property
    def schema_of_arguments(self) -> Mapping[str, Any]:
        """The JSON schema of the arguments, which are always an object."""
        return {"type": "object", **(self.parameters or {})}


class Tool(Object):
    """A tool that the model may call."""

    type: Literal["function"]
    """Only functions."""
    function: FunctionDefinition
    """The function."""

    def for_template(self) -> dict[str, Any]:
        """Return the tool as chat templates receive it, with keys in the order of the models' training data."""
        function = self.function
        told = {"name": function.name, "description": function.description, "parameters": function.parameters}
        return {"type": self.type, "function": {key: value for key, value in told.items() if value is not None}}


class NamedFunction(Object):
    """The name of a tool."""

    name: str
    """A name from `tools`."""


class NamedTool(Object):
    """The tool that the model must call."""

    type: Literal["function"]
    """Only functions."""
    function: NamedFunction
    """Its name."""


ToolChoice = Literal["none", "auto", "required"] | NamedTool | None


def _read_arguments(value: object) -> dict[str, Any]:
    """Return the arguments, given as an object or as its JSON text, as a dict. Raises PydanticCustomError."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else {}
        except (ValueError, RecursionError):
            raise PydanticCustomError("arguments", "must be the JSON text of an object; this is not JSON") from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise PydanticCustomError("arguments", "must be an object, or its JSON text")
    return value


Arguments = Annotated[
    dict[str, Any],
    PlainValidator(_read_arguments),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}, {"type": "null"}]}),
]


class CalledFunction(Object):
    """The function that an earlier answer called."""

    name: str
    """The tool's name."""
    arguments: Arguments = Field(default_factory=dict)
    """The arguments, as JSON text or as an object."""


class EarlierCall(Object):
    """A tool call in an earlier answer."""

    id: str | None = None
    """The id to which the message with the call's result refers."""
    type: Literal["function"] | None = "function"
    """Only functions."""
    function: CalledFunction
    """The function and its arguments."""

    def for_template(self) -> dict[str, Any]:
        """Return the call as chat templates receive it. Arguments are a dict, which each template formats itself."""
        function = {"name": self.function.name, "arguments": self.function.arguments}
        told = {"type": "function", "function": function}
        return told if self.id is None else {"id": self.id, **told}


class ToolUse(NamedTuple):
    """How a request uses tools."""

    tools: Sequence[Tool]  # the tools that the chat template shows to the model
    choice: Literal["none", "auto", "required"]
    callable_tools: Sequence[Tool]  # the tools that the model may call
    only_one_call: bool

    @classmethod
    def of(cls, tools: Sequence[Tool], choice: ToolChoice, parallel: bool | None) -> "ToolUse":
        """Make a ToolUse from a request's fields. `parallel` is the field `parallel_tool_calls`.

        Raises PydanticCustomError if the fields conflict. The type of the error is the name of the wrong field.
        """
        by_name = {tool.function.name: tool for tool in tools}
        if len(by_name) < len(tools):
            raise PydanticCustomError("tools", "tools must have different names")
        if isinstance(choice, NamedTool):
            named = by_name.get(choice.function.name)
            if named is None:
                raise PydanticCustomError("tool_choice", "tool_choice must name one of tools")
            return cls(tools, "required", [named], True)
        if choice == "required" and not tools:
            raise PydanticCustomError("tool_choice", "tool_choice can only be required if there are tools")
        if not tools or choice == "none":
            return cls((), "none", (), False)
        return cls(tools, choice or "auto", tools, parallel is False)

    def for_template(self) -> list[dict[str, Any]] | None:
        """Return the tools as chat templates receive them; None if the model may call none."""
        return [tool.for_template() for tool in self.tools] or None

    def check_size(self) -> None:
        """Raise InvalidRequest if the tools' schemas are too large."""
        sizes = [len(json.dumps(tool.function.parameters or {})) for tool in self.tools]
        for number, size in enumerate(sizes):
            if size > SCHEMA_CHARACTERS_MAX:
                param = f"tools[{number}].function.parameters"
                raise InvalidRequest(
                    f"{param} has {size} characters, more than {SCHEMA_CHARACTERS_MAX}; shorten the schema", param=param
                )
        if sum(sizes) > SCHEMAS_CHARACTERS_MAX:
            message = f"the schemas in tools have {sum(sizes)} characters together, more than {SCHEMAS_CHARACTERS_MAX}"
            raise InvalidRequest(f"{message}; send fewer tools, or shorten their schemas", param="tools")

    def find_parsing(self, dialect: Dialect) -> Parsing:
        """Return how to parse the answer's tool calls. Raises InvalidRequest if this model's calls cannot be parsed."""
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
        strings = {tool.function.name: list(_find_strings(tool)) for tool in self.callable_tools}
        return Parsing(
            tool_format=name,
            strings=strings if FORMATS[name].needs_schemas else {},
            only_one_call=self.only_one_call,
            has_short_ids=dialect.tool_format == "mistral",
        )

    def build_grammar(self, dialect: Dialect, find_token: FindToken) -> str:
        """Return the grammar for an answer that must call a tool; empty if a call is not required.

        Raises InvalidRequest.
        """
        if self.choice != "required":
            return ""
        _, shape = find_forced(dialect.tool_format)
        try:
            return self._build(shape, self.callable_tools, find_token, "tools")
        except InvalidRequest:
            for tool in self.callable_tools:  # find the tool whose schema is wrong
                number = [each.function.name for each in self.tools].index(tool.function.name)
                self._build(shape, [tool], find_token, f"tools[{number}].function.parameters")
            raise

    def _build(self, shape: Shape, tools: Sequence[Tool], find_token: FindToken, param: str) -> str:
        named = [(tool.function.name, tool.function.schema_of_arguments) for tool in tools]
        build = partial(shape.build_grammar, named, find_token, only_one=self.only_one_call)
        return build_grammar("lark", build, param)


def _find_strings(tool: Tool) -> Iterator[str]:
    """Yield the names of the arguments that can only be strings, according to the tool's schema."""
    properties = tool.function.schema_of_arguments.get("properties")
    for name, schema in properties.items() if isinstance(properties, dict) else ():
        if isinstance(schema, dict) and _is_string(schema):
            yield name


def _is_string(schema: Mapping[str, Any]) -> bool:
    if "type" in schema:
        return schema["type"] in ("string", ["string"])
    values = schema.get("enum")
    return isinstance(values, list) and bool(values) and all(isinstance(value, str) for value in values)
