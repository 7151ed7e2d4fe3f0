"""Renders messages to one prompt text with the model's own chat template. Used by `tokenizer`.

Templates get the same Jinja sandbox, filters and globals as in transformers' `apply_chat_template`. transformers itself
is not imported, because it would import torch into the API process.
"""

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from conveyor_engine.errors import InvalidRequest, ModelError

_NOT_FOR_CLIENTS = {  # set by the engine, or read by transformers
    *("tools", "documents", "add_generation_prompt", "continue_final_message"),
    *("messages", "chat_template", "tokenize"),
}


@dataclass(frozen=True, slots=True)
class Rendering:
    """How a conversation is rendered."""

    add_generation_prompt: bool = True  # whether the text ends with the beginning of the assistant's turn
    continue_final_message: bool = False  # whether the text ends with the last message, which the answer continues
    documents: Sequence[Mapping[str, Any]] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None


RENDERING = Rendering()


class TooManyCharacters(Exception):
    """A rendered prompt has more than the allowed characters."""


class ChatTemplate:
    """One template. Thread-safe: rendering keeps no state.

    The template is compiled when it is first rendered. Compiling evaluates constants, such as `'a' * 3000000000`, so it
    needs the same limits as rendering.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """special_tokens: bos_token and others that templates name. Raises TypeError if `source` is not a string."""
        self._special_tokens = dict(special_tokens)
        if not isinstance(source, str):
            raise TypeError(f"the template is a {type(source).__name__}")
        self._source = source

    @property
    def source(self) -> str:
        """Return the template's text."""
        return self._source

    def compile(self) -> None:
        """Compile the template.

        Raises ModelError if it is invalid. The caller limits time and memory (`serving.preparing`).
        """
        _ = self._template

    @cached_property
    def _template(self) -> jinja2.Template:
        try:
            return _environment().from_string(self._source)
        except (jinja2.TemplateError, SyntaxError, RecursionError, ValueError) as error:
            raise ModelError(f"the model's chat template is not valid Jinja: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        max_characters: int,
        variables: Mapping[str, Any],
        rendering: Rendering = RENDERING,
    ) -> str:
        """Return the prompt for the next assistant message. `variables`: values for the template that a client chose.

        Raises InvalidRequest if the template fails, and TooManyCharacters. A template is a program by the model's
        author, so the caller limits its time and memory (`serving.preparing`).
        """
        self._check(variables)
        context = {
            **variables,
            **self._special_tokens,
            "messages": messages,
            "tools": rendering.tools,
            "documents": rendering.documents,
            "add_generation_prompt": rendering.add_generation_prompt,
        }
        text = io.StringIO()
        try:
            for piece in self._template.generate(context):
                if text.tell() + len(piece) > max_characters:
                    break
                text.write(piece)
            else:
                whole = text.getvalue()
                return _cut_behind(whole, messages[-1]) if rendering.continue_final_message else whole
        except (MemoryError, InvalidRequest):
            raise
        except Exception as error:  # a template may raise any error
            what = str(error) if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {what}", param="messages"
            ) from error
        raise TooManyCharacters

    def _check(self, variables: Mapping[str, Any]) -> None:
        for name in variables:
            if name in _NOT_FOR_CLIENTS or name in self._special_tokens or name in self._template.globals:
                param = f"chat_template_kwargs.{name}"
                raise InvalidRequest(f"{param} is not for requests to set; leave it out", param=param)


def _cut_behind(text: str, message: Mapping[str, Any]) -> str:
    """Return the text up to the end of the last message, as transformers does.

    Raises InvalidRequest if the text does not contain the message.
    """
    content = message["content"]
    begin = text.rfind(content.strip())
    if begin < 0:
        what = "continue_final_message: the model's chat template does not show the last message as it is"
        raise InvalidRequest(what, param="continue_final_message")
    is_whole = text.startswith(content, begin)
    return text[: begin + len(content if is_whole else content.strip())]


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationBlock(Extension):
    """Replaces `{% generation %}...{% endgeneration %}`, which marks text for training, with its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own shape)

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Any) -> Any:
        return caller()


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None,
            sort_keys: bool = False) -> str:  # fmt: skip
    """Encode JSON without escaping HTML characters.

    Jinja's own filter escapes them, but models are not trained on escaped text.
    """
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
