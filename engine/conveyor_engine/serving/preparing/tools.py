"""The fields for tool calls: the tools that a model may call, those that it must call, and earlier calls.

`tool_use` has what follows from them for a request.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from conveyor_engine.serving.preparing.one_of import OneOf
from conveyor_engine.serving.preparing.schemas import Object

TOOLS_MAX = 128
_NAME_PATTERN = r"^[a-zA-Z0-9_.-]{1,64}$"

ToolName = Annotated[str, Field(pattern=_NAME_PATTERN)]
Json = dict[str, Any]


class FunctionDefinition(Object):
    """The definition of a function that the model may call."""

    name: ToolName
    """Up to 64 letters, digits, dots, dashes and underscores."""
    description: str | None = None
    """A description for the model."""
    parameters: dict[str, Any] | None = None
    """The JSON schema of the arguments; default: there are none, as in OpenAI's API."""
    strict: bool | None = None
    """True: a schema with a keyword that the engine cannot guarantee gets 400. Otherwise the keyword is relaxed."""

    @property
    def schema_of_arguments(self) -> Mapping[str, Any]:
        """The JSON schema of the arguments, which are always an object."""
        return {"type": "object", **({"additionalProperties": False} if self.parameters is None else self.parameters)}


class Tool(Object):
    """A tool that the model may call."""

    type: Literal["function"]
    """The kind of tool."""
    function: FunctionDefinition
    """The function."""

    def for_template(self) -> dict[str, Any]:
        """Return the tool as chat templates receive it, with keys in the order of the models' training data."""
        function = self.function
        fields = {"name": function.name, "description": function.description, "parameters": function.parameters}
        return {"type": self.type, "function": {key: value for key, value in fields.items() if value is not None}}


class PlainInput(Object):
    """The input of a custom tool is any text."""

    type: Literal["text"]


class Syntax(Object):
    """A grammar for the input of a custom tool."""

    syntax: Literal["lark", "regex"]
    """The kind of grammar."""
    definition: str
    """The grammar."""


class GrammarInput(Object):
    """The input of a custom tool follows a grammar."""

    type: Literal["grammar"]
    grammar: Syntax


class CustomDefinition(Object):
    """A tool whose call has one text, the input, in place of arguments."""

    name: ToolName
    """Up to 64 letters, digits, dots, dashes and underscores."""
    description: str | None = None
    """A description for the model."""
    format: Annotated[PlainInput | GrammarInput, OneOf("type", PlainInput, GrammarInput)] | None = None
    """The form of the input; default: any text."""

    @property
    def syntax(self) -> Syntax | None:
        """The grammar that the input follows; None without one."""
        return self.format.grammar if isinstance(self.format, GrammarInput) else None

    def as_function(self) -> Tool:
        """Return the function that the model sees: its only argument is the input."""
        return build_custom_function(self.name, self.description, self.syntax)


class CustomTool(Object):
    """A tool that takes a text."""

    type: Literal["custom"]
    """The kind of tool."""
    custom: CustomDefinition
    """The tool."""


def build_custom_function(name: str, description: str | None, grammar: Syntax | None) -> Tool:
    """Return the function that stands for a custom tool in the prompt.

    A required call follows a regular expression by the schema. A grammar in Lark is only shown here, because llguidance
    cannot follow it inside a JSON string; `ToolUse` has the calls that follow it.
    """
    text: Json = {"type": "string"}
    if grammar:
        shown = f"The input must match this {grammar.syntax} grammar:\n{grammar.definition}"
        description = f"{description}\n\n{shown}" if description else shown
        text |= {"pattern": f"^(?:{grammar.definition})$"} if grammar.syntax == "regex" else {}
    parameters = {
        "type": "object", "properties": {"input": text}, "required": ["input"], "additionalProperties": False,
    }  # fmt: skip
    function = FunctionDefinition.model_construct(name=name, description=description, parameters=parameters)
    return Tool.model_construct(type="function", function=function)


class LeftOutTool(Object):
    """A tool of a kind that only its maker's servers or models know. The model does not see it."""

    type: str


def count_left_out(tools: Sequence[Object] | None) -> int:
    """Return the number of tools that the model does not see."""
    return sum(isinstance(tool, LeftOutTool) for tool in tools or ())


AnyTool = Annotated[Tool | CustomTool | LeftOutTool, OneOf("type", Tool, CustomTool, other=LeftOutTool)]
Tools = Annotated[list[AnyTool], Field(max_length=TOOLS_MAX, fail_fast=True)]


class NamedFunction(Object):
    """The name of a tool."""

    name: str
    """A name from `tools`."""


class NamedTool(Object):
    """The function that the model must call."""

    type: Literal["function"]
    """The kind of tool."""
    function: NamedFunction
    """Its name."""


class NamedCustomTool(Object):
    """The custom tool that the model must call."""

    type: Literal["custom"]
    """The kind of tool."""
    custom: NamedFunction
    """Its name."""


_Named = Annotated[NamedTool | NamedCustomTool, OneOf("type", NamedTool, NamedCustomTool)]


class AllowedTools(Object):
    """Some of the tools, and whether the model must call one of them."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[_Named], Field(min_length=1, max_length=TOOLS_MAX)]


class AllowedToolsChoice(Object):
    """The model sees only some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def get_name(named: NamedTool | NamedCustomTool) -> str:
    """Return the name of the tool."""
    return (named.function if isinstance(named, NamedTool) else named.custom).name


_Chosen = Annotated[
    NamedTool | NamedCustomTool | AllowedToolsChoice, OneOf("type", NamedTool, NamedCustomTool, AllowedToolsChoice)
]
ToolChoice = Literal["none", "auto", "required"] | _Chosen | None


def _read_arguments(value: object) -> Json:
    """Return the arguments, given as an object or as its JSON text, as a dict.

    Empty if the text is not an object: an answer can contain such a call (`max_tokens` cut it, or the model wrote it
    badly), and the conversation must be able to go on. Raises PydanticCustomError for any other type.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}
    if not isinstance(value, dict | None):
        raise PydanticCustomError("arguments", "must be an object, or its JSON text")
    return value or {}


Arguments = Annotated[
    Json,
    PlainValidator(_read_arguments),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}, {"type": "null"}]}),
]


class CalledFunction(Object):
    """The function that an earlier answer called."""

    name: str
    """The tool's name."""
    arguments: Arguments = Field(default_factory=dict)
    """The arguments, as JSON text or as an object."""


class CalledCustom(Object):
    """The custom tool that an earlier answer called."""

    name: str
    """The tool's name."""
    input: str
    """The text."""


class EarlierCustomCall(Object):
    """A call of a custom tool in an earlier answer."""

    id: str | None = None
    """The id to which the message with the call's result refers."""
    type: Literal["custom"]
    """The kind of tool."""
    custom: CalledCustom
    """The tool and its input."""

    def for_template(self) -> Json:
        """Return the call as chat templates receive it: as a call of the function that stands for the tool."""
        function = {"name": self.custom.name, "arguments": {"input": self.custom.input}}
        call = {"type": "function", "function": function}
        return call if self.id is None else {"id": self.id, **call}


class EarlierCall(Object):
    """A tool call in an earlier answer."""

    id: str | None = None
    """The id to which the message with the call's result refers."""
    type: Literal["function"] | None = "function"
    """The kind of tool."""
    function: CalledFunction
    """The function and its arguments."""

    def for_template(self) -> Json:
        """Return the call as chat templates receive it. Arguments are a dict, which each template formats itself."""
        function = {"name": self.function.name, "arguments": self.function.arguments}
        call = {"type": "function", "function": function}
        return call if self.id is None else {"id": self.id, **call}


AnyEarlierCall = Annotated[
    EarlierCall | EarlierCustomCall, OneOf("type", EarlierCall, EarlierCustomCall, default="function")
]
