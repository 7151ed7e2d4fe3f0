"""The tools of /v1/responses: functions, custom tools and namespaces of both. Used by `responses_schemas`. Pure."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from conveyor_engine.serving.preparing.one_of import OneOf
from conveyor_engine.serving.preparing.schemas import Object
from conveyor_engine.serving.preparing.tool_use import CalledAs, Choice, Offered, find_lark
from conveyor_engine.serving.preparing.tools import (
    TOOLS_MAX,
    FunctionDefinition,
    LeftOutTool,
    PlainInput,
    Syntax,
    Tool,
    ToolName,
    build_custom_function,
)

Json = dict[str, Any]


class FunctionTool(Object):
    """A function that the model may call."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None

    def as_function(self) -> Tool:
        """Return the tool as the chat API has it."""
        function = FunctionDefinition.model_construct(
            name=self.name, description=self.description, parameters=self.parameters, strict=self.strict
        )
        return Tool.model_construct(type="function", function=function)


class GrammarInput(Syntax):
    """The input of a custom tool follows a grammar."""

    type: Literal["grammar"]


class CustomTool(Object):
    """A tool whose call has one text, the input, in place of arguments."""

    type: Literal["custom"]
    name: ToolName
    description: str | None = None
    format: Annotated[PlainInput | GrammarInput, OneOf("type", PlainInput, GrammarInput)] | None = None

    @property
    def syntax(self) -> Syntax | None:
        """The grammar that the input follows; None without one."""
        return self.format if isinstance(self.format, GrammarInput) else None

    def as_function(self) -> Tool:
        """Return the function that stands for the tool in the prompt."""
        return build_custom_function(self.name, self.description, self.syntax)


_Member = Annotated[FunctionTool | CustomTool | LeftOutTool, OneOf("type", FunctionTool, CustomTool, other=LeftOutTool)]


class NamespaceTool(Object):
    """Tools under a common name. The model sees functions `<namespace>__<name>`."""

    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: Annotated[list[_Member], Field(max_length=TOOLS_MAX, fail_fast=True)]


ResponsesTool = Annotated[
    FunctionTool | CustomTool | NamespaceTool | LeftOutTool,
    OneOf("type", FunctionTool, CustomTool, NamespaceTool, other=LeftOutTool),
]


class NamedChoice(Object):
    """The tool that the model must call."""

    type: Literal["function", "custom"]
    name: str


_Named = Annotated[NamedChoice, OneOf("type", NamedChoice)]


class AllowedChoice(Object):
    """The model may call only some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[
        list[Annotated[NamedChoice, OneOf("type", NamedChoice)]], Field(min_length=1, max_length=TOOLS_MAX)
    ]


_Chosen = Annotated[NamedChoice | AllowedChoice, OneOf("type", NamedChoice, AllowedChoice)]
ResponsesToolChoice = Literal["none", "auto", "required"] | _Chosen | None


def read_choice(choice: ResponsesToolChoice) -> Choice:
    """Return which tools the model may call."""
    if choice is None or isinstance(choice, str):
        return Choice(choice or "auto")
    if isinstance(choice, AllowedChoice):
        return Choice(choice.mode, [each.name for each in choice.tools], is_list=True)
    return Choice("required", [choice.name])


def join_name(namespace: str | None, name: str) -> str:
    """Return the name of a function in the prompt."""
    return f"{namespace}__{name}" if namespace else name


def offer(tools: Sequence[Object] | None) -> list[Offered]:
    """Return the functions that the model sees. Tools of other kinds are left out."""
    return [
        each
        for number, tool in enumerate(tools or ())
        for each in (
            _offer_all(tool, f"tools[{number}]")
            if isinstance(tool, NamespaceTool)
            else _offer(tool, f"tools[{number}]", None)
        )
    ]


def _offer_all(namespace: NamespaceTool, place: str) -> Iterator[Offered]:
    """Yield a namespace's functions. The first one's description begins with the namespace's."""
    about = namespace.description
    for number, member in enumerate(namespace.tools):
        for offered in _offer(member, f"{place}.tools[{number}]", namespace.name):
            function = offered.tool.function
            function.name = join_name(namespace.name, function.name)
            function.description = "\n\n".join(filter(None, [about, function.description])) or None
            about = None
            yield offered


def _offer(tool: Object, place: str, namespace: str | None) -> Iterator[Offered]:
    if isinstance(tool, CustomTool):
        called = CalledAs(tool.name, namespace, is_custom=True)
        yield Offered(tool.as_function(), f"{place}.custom.format", called, find_lark(tool.syntax))
    elif isinstance(tool, FunctionTool):
        called_as = CalledAs(tool.name, namespace) if namespace else None
        yield Offered(tool.as_function(), f"{place}.function.parameters", called_as)
