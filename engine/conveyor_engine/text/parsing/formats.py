"""The formats in which models call tools, and how a model's chat template shows which one the model uses.

Each format is a row of a table: how its calls are parsed, and how a grammar forces the model to write them. Used by
`serving.preparing` (to choose format and grammar) and by `build`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from conveyor_engine.text.json_grammar import JSON_OPTIONS, JsonSchema
from conveyor_engine.text.parsing.calls import Leading, Marked
from conveyor_engine.text.parsing.machine import Program
from conveyor_engine.text.parsing.pythonic import Pythonic
from conveyor_engine.text.parsing.xml_calls import XmlSyntax
from conveyor_engine.text.tags import FindToken, quote


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """The text around the tool names and arguments of calls, for a grammar."""

    begin: str  # before the first call
    separator: str
    end: str
    before_name: str
    before_arguments: str
    behind_call: str

    def build_grammar(self, tools: Sequence[tuple[str, JsonSchema]], find_token: FindToken, *, only_one: bool) -> str:
        """Return a grammar in Lark's syntax. `tools`: name and schema of each tool that may be called.

        find_token: returns the token for a whole mark, or None. llguidance does not match such a token with
        a text literal, so the grammar contains the token's id.
        """
        lines = [
            f"call_{number}: {json.dumps(self.before_name + json.dumps(name) + self.before_arguments)} "
            f"%json {json.dumps(schema.embedded())} {quote(self.behind_call, find_token)}"
            for number, (name, schema) in enumerate(tools)
        ]
        calls = " | ".join(f"call_{number}" for number in range(len(tools)))
        more = "" if only_one else f" ({quote(self.separator, find_token)} call)*"
        start = f"start: {quote(self.begin, find_token)} call{more} {quote(self.end, find_token)}"
        return "\n".join([start, f"call: {calls}", *lines])

    def build_free_grammar(self, tools: Sequence[str]) -> str:
        """Return the rule `calls`, for calls of these tools with any arguments.

        The lexer cannot tell a call in one literal from a form that begins like it, so this is JSON, as forms are.
        """
        key = self.before_arguments.split('"')[1]
        properties = {"name": {"enum": list(tools)}, key: {"type": "object"}}
        call = {"type": "object", "properties": properties, "required": ["name", key], "additionalProperties": False}
        begin, separator, end = (json.dumps(part) if part else "" for part in (self.begin, self.separator, self.end))
        many = f"calls: {begin} call ({separator} call)* {end}"
        return f"{many}\ncall: %json {json.dumps({**call, 'x-guidance': JSON_OPTIONS})}"


@dataclass(frozen=True, slots=True)
class Format:
    """One format."""

    reads: Marked | Leading | Pythonic | XmlSyntax
    shape: CallSyntax | None = None  # None: required calls use the format LIST
    has_special_tokens: bool = False  # whether its marks are special tokens, which would otherwise be hidden
    templates: Sequence[Sequence[str]] = ()  # a chat template that has all texts of one entry has this format
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
_REST: Final = r"""rest: TEXT (<[*]> TEXT)*
TEXT: /(.|\n)*/"""  # any tokens; the first one may begin within a mark
_FUNCTIONS: Final = ("<function=", ">", "</function>", "<parameter=", ">", "</parameter>")
_BESIDE_ARGUMENTS: Final = ('{"name": ', ', "arguments": ', "}")
FORMATS: Final[Mapping[str, Format]] = {
    # in the order in which templates are searched: more specific formats come first
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
    "deepseek_v3": Format(
        Marked(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            ("```<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
            "<｜tool▁calls▁begin｜>",
            name_ends=("\n```json\n",),
        ),
        has_special_tokens=True,
        templates=[["<｜tool▁calls▁begin｜>", "```json"]],
        begins=["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"],
    ),
    "deepseek_v31": Format(
        Marked(
            "<｜tool▁call▁begin｜>",
            ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
            "<｜tool▁calls▁begin｜>",
            name_ends=("<｜tool▁sep｜>",),
        ),
        has_special_tokens=True,
        templates=[["<｜tool▁calls▁begin｜>"]],
        begins=["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"],
    ),
    "mistral": Format(
        Marked("[TOOL_CALLS]", is_list=True, name_ends=("[ARGS]", "{"), id_mark="[CALL_ID]"),
        has_special_tokens=True,
        templates=[["[TOOL_CALLS]"]],
        begins=["[TOOL_CALLS]"],
    ),
    "granite": Format(
        Marked("<|tool_call|>", ("<|/tool_call|>",), is_list=True),
        has_special_tokens=True,
        templates=[["<|tool_call|>"], ["<|tool|>", "<|/tool|>"]],
        begins=["<|tool_call|>"],
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
    "llama4_pythonic": Format(
        Pythonic("<|python_start|>", "<|python_end|>"),
        has_special_tokens=True,
        templates=[["func_name1(params_name1"]],
        begins=["<|python_start|>", "[{tool}("],
    ),
    "llama3_json": Format(
        Leading("<|python_tag|>", separators=(";", ",")),
        CallSyntax("", "; ", "", '{"name": ', ', "parameters": ', "}"),
        has_special_tokens=True,
        templates=[["<|python_tag|>"], ['"parameters": dictionary']],
        begins=["<|python_tag|>"],
    ),
    LIST: Format(Leading(opening="["), CallSyntax("[", ", ", "]", *_BESIDE_ARGUMENTS)),
}
_OTHERS: Final = {"<|channel|>": "harmony, whose channels this engine does not read"}


def find_format(template: str) -> str | None:
    """Return the format in which a chat template tells its model to call tools; None if it has no supported format."""
    if any(mark in template for mark in _OTHERS):
        return None
    for name, row in FORMATS.items():
        if any(all(text in template for text in texts) for texts in row.templates):
            return name
    return None


def find_foreign_format(template: str) -> str | None:
    """Return the name of a chat template's format if the format is known but not supported; otherwise None."""
    return next((name for mark, name in _OTHERS.items() if mark in template), None)


def find_forced(name: str | None) -> tuple[str, CallSyntax]:
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
    """
    row = FORMATS[name]
    marks = dict.fromkeys(mark.replace("{tool}", tool) for mark in row.begins for tool in tools)
    begins = [json.dumps(mark) if (token := find_token(mark)) is None else f"<[{token}]>" for mark in marks]
    free = f"({' | '.join(begins)}) rest" if begins else ""
    leading = "" if row.shape is None or row.reads_marks else row.shape.build_free_grammar(tools)
    start = f"start: {' | '.join(filter(None, ['@form', free, leading and 'calls']))}"
    inner = json.loads(form)["grammars"][0] if form.startswith("{") else {"lark_grammar": form}
    return json.dumps({"grammars": [{"lark_grammar": f"{start}\n{_REST}\n{leading}"}, {**inner, "name": "form"}]})


def build_program(name: str, strings: Mapping[str, Sequence[str]]) -> Program:
    """Return the program that parses a format's calls. `strings`: the string arguments of each tool, by its schema."""
    reads = FORMATS[name].reads
    if isinstance(reads, XmlSyntax):
        return reads.build({tool: frozenset(keys) for tool, keys in strings.items()})
    return reads.build()
