"""Parses the thinking of a model, which comes before the answer and between two marks. It becomes `reasoning`.

`MARKS` has the marks of each model family. The template of a model that always thinks writes the first mark, so the
prompt ends within the thinking.
"""

from collections.abc import Mapping
from functools import partial
from typing import Final, NamedTuple

from conveyor_engine.text.parsing.machine import Program, Reading, Write, read_until, replay, skip_space


class Marks(NamedTuple):
    """The marks around the thinking."""

    begin: str
    end: str
    are_special_tokens: bool = False  # whether the marks are special tokens, which would otherwise be hidden
    first_token: str = ""  # the token that begins the thinking, if that is not the whole mark
    prompt_end: str = ""  # the end of each prompt after which the model may think; "": any


GPT_OSS: Final = "openai_gptoss"
MARKS: Final[Mapping[str, Marks]] = {
    GPT_OSS: Marks("<|channel|>analysis<|message|>", "<|end|>", True, prompt_end="<|start|>assistant"),
    "gemma4": Marks("<|channel>thought", "<channel|>", True, first_token="<|channel>"),
    "think": Marks("<think>", "</think>"),
    "mistral": Marks("[THINK]", "[/THINK]", are_special_tokens=True),
    "cohere_command3": Marks("<|START_THINKING|>", "<|END_THINKING|>", True),
    "seed_oss": Marks("<seed:think>", "</seed:think>"),
}


def find_marks(template: str) -> str | None:
    """Return the key of the marks in a chat template; None without marks."""
    shown = ((name, marks.begin if name == GPT_OSS else marks.end) for name, marks in MARKS.items())
    return next((name for name, mark in shown if mark in template), None)


def build_thinking(marks: Marks, *, has_begun: bool, rest: Program) -> Program:
    """Return a program that reads the thinking, if there is any, then the `rest`.

    White space around marks is dropped.
    """

    def read(write: Write, first: str | None) -> Reading[None]:
        seen: list[str] = []
        character = yield from skip_space(first, seen.append)
        thinks = has_begun
        for expected in marks.begin:
            if character != expected:
                break
            seen.append(character)
            character = yield
        else:
            thinks = True
            seen.clear()
        yield from replay((think if thinks else rest)(write, None), [*seen, character])

    def think(write: Write, first: str | None) -> Reading[None]:
        character = yield from skip_space(first)
        yield from read_until(partial(write, "reasoning"), (marks.end,), character)
        character = yield from skip_space()
        yield from rest(write, character)

    return read
