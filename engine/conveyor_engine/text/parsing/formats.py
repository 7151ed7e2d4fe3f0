"""The formats in which models call tools, and how a model's chat template shows which one the model uses.

Each format is a row of a table: how its calls are parsed, and how a grammar forces the model to write them. Used by
`serving.preparing` (to choose format and grammar) and by `build`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from conveyor_engine.text.parsing.call_syntax import CallSyntax, ChannelSyntax, embed_form, is_json
from conveyor_engine.text.parsing.calls import Leading, Marked
from conveyor_engine.text.parsing.gemma import Gemma
from conveyor_engine.text.parsing.interface import CallIds
from conveyor_engine.text.parsing.machine import Program
from conveyor_engine.text.parsing.pythonic import Pythonic
from conveyor_engine.text.parsing.xml_calls import Strings, XmlSyntax
from conveyor_engine.text.tags import FindToken, quote


@dataclass(frozen=True, slots=True)
class Format:
    """One format."""

    reads: Marked | Leading | Pythonic | XmlSyntax | Gemma | None  # None: `harmony` reads the whole answer
    shape: CallSyntax | ChannelSyntax | None = None  # None: required calls use the format LIST
    has_special_tokens: bool = False  # whether its marks are special tokens, which would otherwise be hidden
    templates: Sequence[Sequence[str]] = ()  # a chat template that has all texts of one entry has this format
    call_ids: CallIds = "random"
    begins: Sequence[str] = ()  # marks with which calls begin; `{tool}` stands for the name of a tool

    @property
    def needs_schemas(self) -> bool:
        """Whether parsing needs the tools' schemas to recognize strings."""
        return isinstance(self.reads, XmlSyntax)

    @property
    def reads_marks(self) -> bool:
        """Whether calls are anywhere behind a mark. Otherwise an answer may begin with a call that has no mark."""
        return not isinstance(self.reads, Leading)


LIST = "list"
CHANNELS: Final = "openai"
COMMAND: Final = "cohere_command3"
COMMAND_CALLS: Final = Marked(
    "<|START_ACTION|>",
    ("<|END_ACTION|>",),
    ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    is_list=True,
)
_REST: Final = r"""rest: TEXT (<[*]> TEXT)*
TEXT: /(.|\n)*/
SPACE: /[ \n\r\t]{1,8}/"""  # rest: any tokens; the first one may begin within a mark
_FUNCTIONS: Final = ("<function=", ">", "</function>", "<parameter=", ">", "</parameter>")
_BESIDE_ARGUMENTS: Final = ('{"name": ', ', "arguments": ', "}")


def _dsml(outer: str, space: str = "") -> Format:
    """Return the row of a DeepSeek model whose marks have the token `｜DSML｜`."""
    marks = ("<｜DSML｜", "</｜DSML｜")
    begin, end = (f"{mark}{outer}>" for mark in marks)
    function, parameter = (f'{marks[0]}{space}{name} name="' for name in ("invoke", "parameter"))
    function_end, parameter_end = (f"{marks[1]}{space}{name}>" for name in ("invoke", "parameter"))
    syntax = XmlSyntax(
        begin, end, function, '">', function_end, parameter, '"', parameter_end, value=">", string_mark='string="true"'
    )
    return Format(
        syntax,
        has_special_tokens=True,
        templates=[["｜DSML｜", f"{outer}>"]],
        begins=[begin, function.removesuffix(' name="')],
    )


FORMATS: Final[Mapping[str, Format]] = {
    # in the order in which templates are searched: more specific formats come first
    CHANNELS: Format(None, ChannelSyntax(), has_special_tokens=True, templates=[["<|channel|>analysis<|message|>"]]),
    "gemma4": Format(
        Gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
        has_special_tokens=True,
        templates=[["<|tool_call>"]],
        begins=["<|tool_call>"],
    ),
    "functiongemma": Format(
        Gemma("<start_function_call>", "<end_function_call>", "<escape>"),
        has_special_tokens=True,
        templates=[["<start_function_call>"]],
        begins=["<start_function_call>"],
    ),
    "glm45": Format(
        XmlSyntax(
            "", "", "<tool_call>", "", "</tool_call>", "<arg_key>", "</arg_key>", "</arg_value>", value="<arg_value>"
        ),
        templates=[["<arg_key>"]],
        begins=["<tool_call>"],
    ),
    "minimax_m2": Format(
        XmlSyntax(
            "<minimax:tool_call>",
            "</minimax:tool_call>",
            '<invoke name="',
            '">',
            "</invoke>",
            '<parameter name="',
            '">',
            "</parameter>",
        ),
        templates=[["<minimax:tool_call>"]],
        begins=["<minimax:tool_call>", "<invoke name="],
    ),
    "seed_oss": Format(
        XmlSyntax("<seed:tool_call>", "</seed:tool_call>", *_FUNCTIONS),
        templates=[["<seed:tool_call>"]],
        begins=["<seed:tool_call>", "<function="],
    ),
    "qwen3_coder": Format(
        XmlSyntax("<tool_call>", "</tool_call>", *_FUNCTIONS),
        templates=[["<function=", "<parameter="]],
        begins=["<tool_call>", "<function="],
    ),
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "deepseek_v41": _dsml(" calls", " "),
    "deepseek_v3": Format(
        Marked(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            ("```<｜tool▁call▁end｜>",),
            ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
            name_ends=("\n```json\n",),
        ),
        has_special_tokens=True,
        templates=[["<｜tool▁calls▁begin｜>", "```json"]],
        begins=["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"],
    ),
    "deepseek_v31": Format(
        Marked(
            "<｜tool▁call▁begin｜>",
            ("<｜tool▁call▁end｜>",),
            ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
            name_ends=("<｜tool▁sep｜>",),
        ),
        has_special_tokens=True,
        templates=[["<｜tool▁calls▁begin｜>"]],
        begins=["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"],
    ),
    "kimi_k2": Format(
        Marked(
            "<|tool_call_begin|>",
            ("<|tool_call_end|>",),
            ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            name_ends=("<|tool_call_argument_begin|>",),
            name=re.compile(r"(?:functions\.)?([^:]+):[0-9]+"),
        ),
        has_special_tokens=True,
        call_ids="numbered",
        templates=[["<|tool_calls_section_begin|>"], ["<|im_system|>tool_declare"]],
        begins=["<|tool_calls_section_begin|>", "<|tool_call_begin|>"],
    ),
    "mistral": Format(
        Marked("[TOOL_CALLS]", is_list=True, name_ends=("[ARGS]", "{"), id_mark="[CALL_ID]"),
        has_special_tokens=True,
        call_ids="short",
        templates=[["[TOOL_CALLS]"]],
        begins=["[TOOL_CALLS]"],
    ),
    "granite": Format(
        Marked("<|tool_call|>", ("<|/tool_call|>",), is_list=True),
        has_special_tokens=True,
        templates=[["<|tool_call|>"], ["<|tool|>", "<|/tool|>"]],
        begins=["<|tool_call|>"],
    ),
    COMMAND: Format(
        COMMAND_CALLS,
        has_special_tokens=True,
        templates=[["<|START_ACTION|>"]],
        begins=["<|START_ACTION|>"],
    ),
    "jamba": Format(
        Marked("<tool_calls>", ("</tool_calls>",), is_list=True),
        templates=[["<tool_calls>"]],
        begins=["<tool_calls>"],
    ),
    "internlm": Format(
        Marked("<|action_start|><|plugin|>", ("<|action_end|>",)),
        has_special_tokens=True,
        templates=[["<|action_start|>", "<|plugin|>"]],
        begins=["<|action_start|>"],
    ),
    "longcat": Format(
        Marked("<longcat_tool_call>", ("</longcat_tool_call>",)),
        templates=[["<longcat_tool_call>"]],
        begins=["<longcat_tool_call>"],
    ),
    "phi4_mini_json": Format(Marked("functools", is_list=True), templates=[["functools["]], begins=["functools["]),
    "hermes": Format(
        Marked("<tool_call>", ("</tool_call>",)),
        CallSyntax("<tool_call>\n", "\n<tool_call>\n", "", *_BESIDE_ARGUMENTS[:2], "}\n</tool_call>"),
        templates=[["<tool_call>"]],
        begins=["<tool_call>"],
    ),
    "lfm2": Format(
        Pythonic("<|tool_call_start|>", "<|tool_call_end|>"),
        has_special_tokens=True,
        templates=[["<|tool_call_start|>"], ["<|tool_list_start|>"]],
        begins=["<|tool_call_start|>"],
    ),
    "olmo3": Format(
        Pythonic("<function_calls>", "</function_calls>", is_list=False),
        templates=[["<function_calls>", "<functions>"]],
        begins=["<function_calls>"],
    ),
    "llama4_pythonic": Format(
        Pythonic("<|python_start|>", "<|python_end|>"),
        has_special_tokens=True,
        templates=[["func_name1(params_name1"], ["func_name1(param1=value1"]],
        begins=["<|python_start|>", "[{tool}("],
    ),
    "llama3_json": Format(
        Leading("<|python_tag|>", separators=(";", ",")),
        CallSyntax("", "; ", "", '{"name": ', ', "parameters": ', "}"),
        has_special_tokens=True,
        templates=[["<|python_tag|>"], ['"parameters": dictionary']],
        begins=["<|python_tag|>"],
    ),
    LIST: Format(
        Leading(opening="["),
        CallSyntax("[", ", ", "]", *_BESIDE_ARGUMENTS),
        templates=[['[{"name": "tool_call_name", "arguments": ']],
    ),
}


def find_format(template: str) -> str | None:
    """Return the format in which a chat template tells its model to call tools; None if it has no supported format."""
    for name, row in FORMATS.items():
        if any(all(text in template for text in texts) for texts in row.templates):
            return name
    return None


def find_forced(name: str | None) -> tuple[str, CallSyntax | ChannelSyntax]:
    """Return the format, and its shape, that a grammar forces if a call is required.

    This is the model's own format `name` if the format has a shape, otherwise LIST.
    """
    shape = FORMATS[name].shape if name else None
    if name and shape:
        return name, shape
    fallback = FORMATS[LIST].shape
    assert fallback
    return LIST, fallback


def build_call_or_form(name: str, tools: Sequence[str], form: str, find_token: FindToken) -> str:
    """Return a grammar whose answers follow the grammar `form`, or are calls in format `name`.

    After a mark, any token may follow, as in an answer without a form: the model knows its own format.
    Calls and JSON may begin with white space. Other forms may not, so there a call may not either: the white space
    would otherwise force the call.
    """
    row = FORMATS[name]
    marks = dict.fromkeys(mark.replace("{tool}", tool) for mark in row.begins for tool in tools)
    begins = [quote(mark, find_token) for mark in marks]
    free = f"({' | '.join(begins)}) rest" if begins else ""
    leading = row.shape.build_free_grammar(tools) if isinstance(row.shape, CallSyntax) and not row.reads_marks else ""
    space = "SPACE? " if is_json(form) else ""
    start = f"start: {space}({' | '.join(filter(None, ['@form', free, leading and 'calls']))})"
    return embed_form(f"{start}\n{_REST}\n{leading}", form)


def build_program(name: str, strings: Strings) -> Program:
    """Return the program that parses a format's calls."""
    reads = FORMATS[name].reads
    assert reads, "the format is not read by its calls alone"
    if isinstance(reads, XmlSyntax):
        return reads.build(strings)
    return reads.build()
