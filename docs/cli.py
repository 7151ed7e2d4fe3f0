"""Prints cli.md, from the parsers of the commands: `python docs/cli.py`.

Called by `make generate`, and by `make check-generated`, which compares.
"""

import argparse
import re
from collections.abc import Iterator
from typing import Any

from conveyor_engine.__main__ import build_parser as build_engine
from conveyor_kubectl.command import build_parser as build_kubectl
from conveyor_local.command import build_parser as build_local

_HEAD = """\
# Commands

Written by `make generate` from the commands themselves; do not edit.

You work with three programs: `kubectl conveyor`, which you [install](install.md#look-at-the-cluster) beside kubectl,
`conveyor`, which [serves manifests without a cluster](local.md), and the engine alone. The flags of the operator, the
gateway, the metrics server, offline jobs
and `python -m conveyor_engine serve` are on the page [Configuration](configuration.md). The chart sets most of them.

"""
_ELSEWHERE = {"serve", "check"}  # commands of the engine whose flags are settings, which configuration.md lists


def page() -> Iterator[str]:
    yield _HEAD
    kubectl = build_kubectl()
    yield f"## {kubectl.prog}\n\n{_flow(kubectl.description)}\n\n"
    for _, command in _commands(kubectl):
        yield _section(command, _arguments(command))
    local = build_local()
    yield f"## {local.prog}\n\n{_flow(local.description)}\n\n"
    for _, command in _commands(local):
        yield _section(command, _arguments(command))
    engine = build_engine()
    yield f"## {engine.prog}\n\n{_flow(engine.description)}\n\n"
    for name, command in _commands(engine):
        yield _section(command, [] if name in _ELSEWHERE else _arguments(command))


def _commands(parser: argparse.ArgumentParser) -> list[tuple[str, argparse.ArgumentParser]]:
    """Return each command with its parser, and the commands of a command in its place.

    The description is the help where a command has none.
    """
    found = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not found:
        return []
    (action,) = found
    short = {choice.dest: choice.help for choice in action._choices_actions}
    for name, command in action.choices.items():
        command.description = command.description or f"{(short[name] or '').capitalize()}."
    return [found for name, command in action.choices.items() for found in _commands(command) or [(name, command)]]


def _section(command: argparse.ArgumentParser, arguments: list[argparse.Action]) -> str:
    lines = [f"### {command.prog}", "", _flow(command.description), ""]
    if arguments:
        lines += ["| argument | meaning |", "| --- | --- |"]
        lines += [f"| {_name(argument)} | {_meaning(argument)} |" for argument in arguments]
        lines.append("")
    if command.epilog:
        lines += [_flow(command.epilog), ""]
    return "\n".join(lines) + "\n"


def _arguments(command: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in command._actions if not isinstance(action, argparse._HelpAction)]


def _name(action: argparse.Action) -> str:
    metavar = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    if action.choices and len(list(action.choices)) < 5:
        metavar = "{" + ",".join(map(str, action.choices)) + "}"
    if not action.option_strings:
        return f"`{_cell(metavar)}`"
    value = "" if action.nargs == 0 else f" {metavar}"
    return f"`{_cell(', '.join(action.option_strings) + value)}`" + (" (required)" if action.required else "")


def _meaning(action: argparse.Action) -> str:
    values: dict[str, Any] = vars(action) | {"choices": ", ".join(map(str, action.choices or ()))}
    return _cell(_flow((action.help or "") % values))


def _flow(text: str | None) -> str:
    return re.sub(r"\s+", " ", text or "").strip()


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


if __name__ == "__main__":
    print("".join(page()).rstrip())
