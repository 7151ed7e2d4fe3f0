"""Builds the grammars that force a model to write tool calls. Used by `formats`."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from conveyor_engine.text.json_grammar import JSON_OPTIONS, JsonSchema
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


_CHANNELS: Final = """analysis: {channel} "analysis" {message} TEXT {end} {start} "assistant"
TEXT: /(.|\\n)*/"""


class ChannelSyntax:
    """Calls in the channels of gpt-oss, after any thinking. The token `<|call|>` ends the answer, so there is one."""

    def build_grammar(self, tools: Sequence[tuple[str, JsonSchema]], find_token: FindToken, *, only_one: bool) -> str:
        """Return a grammar in Lark's syntax, as `CallSyntax.build_grammar` does."""
        del only_one
        calls = [
            f"{quote(f'<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>', find_token)} "
            f"%json {json.dumps(schema.embedded())}"
            for name, schema in tools
        ]
        lines = [f"call_{number}: {call}" for number, call in enumerate(calls)]
        start = f"start: analysis* ({' | '.join(f'call_{number}' for number in range(len(calls)))})"
        return "\n".join([start, *lines, _analysis(find_token)])


def build_form_in_channels(form: str, tools: Sequence[str], find_token: FindToken) -> str:
    """Return a grammar for answers of gpt-oss whose text follows the grammar `form`, or that call one of the tools."""
    text = f"{quote('<|channel|>final<|message|>', find_token)} @form"
    lines = [f"start: analysis* ({text}{' | call' if tools else ''})", _analysis(find_token)]
    if tools:
        begin, kind, message = (
            quote(mark, find_token)
            for mark in ("<|channel|>commentary to=functions.", "<|constrain|>json", "<|message|>")
        )
        names = " | ".join(map(json.dumps, tools))
        lines.append(f'call: {begin} ({names}) (" " {kind} | " json")? {message} TEXT')
    return embed_form("\n".join(lines), form)


def build_input_in_channels(form: str, tool: str, find_token: FindToken) -> str:
    """Return a grammar for answers of gpt-oss that call the tool with a text that follows the grammar `form`."""
    call = quote(f"<|channel|>commentary to=functions.{tool}<|message|>", find_token)
    return embed_form(f"start: analysis* {call} @form\n{_analysis(find_token)}", form)


def embed_form(lark: str, form: str) -> str:
    """Return the grammar `lark`, in which `@form` stands for the grammar `form`."""
    return json.dumps({"grammars": [{"lark_grammar": lark}, {**_read_form(form), "name": "form"}]})


def is_json(form: str) -> bool:
    """Whether an answer that follows the grammar `form` is JSON."""
    return _read_form(form).get("json_schema") is not None


def _read_form(form: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(form)["grammars"][0] if form.startswith("{") else {"lark_grammar": form}
    return found


def _analysis(find_token: FindToken) -> str:
    marks = {name: quote(f"<|{name}|>", find_token) for name in ("channel", "message", "end", "start")}
    return _CHANNELS.format(**marks)
