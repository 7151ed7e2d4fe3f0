"""The engine's commands, `python -m conveyor_engine`. START HERE.

`serve` reads the configuration, loads the tokenizer, and starts the HTTP server and the engine process. `fetch` brings
a model's files to a volume. `check` only parses the configuration; the operator uses it before a rollout removes an old
engine. If the process cannot start, it writes one log line and a termination message, and exits with a code that is not
0.
"""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

from conveyor_engine import __version__
from conveyor_engine.config.sources import add_flags, parse_config
from conveyor_engine.config.task_settings import settle
from conveyor_engine.errors import ConfigError, StartError, named
from conveyor_engine.logs import configure_logging
from conveyor_engine.registry import find_task, load, load_about
from conveyor_engine.termination import write_facts, write_termination_message
from conveyor_process.running import drop_unwritten, end_on_sigterm

_log = logging.getLogger("conveyor_engine")


class _Parser(argparse.ArgumentParser):
    """Raises ConfigError for a wrong flag, as for any other wrong setting."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}; --help lists the flags")


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of all commands and their flags."""
    parser = _Parser(prog="python -m conveyor_engine", description="The batching inference engine of Conveyor.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    serve = commands.add_parser(
        "serve",
        help="serve a model over HTTP",
        description="Serve a model over HTTP. Each setting can also come from CONVEYOR_ENGINE_<SETTING>, or from "
        "the file that --config names.",
    )
    add_flags(serve)
    fetch = commands.add_parser(
        "fetch", help="bring a model's files to a directory", description="Bring a model's files to a directory."
    )
    fetch.add_argument(
        "--uri",
        required=True,
        help="what to download: hf://organisation/name[@revision], with :file behind it for a GGUF "
        "file, or s3://bucket/prefix; "
        "pvc://... or oci://...: only check the files that are mounted at the target",
    )
    fetch.add_argument("--target", required=True, help="the directory that the engine will serve from")
    fetch.add_argument(
        "--credentials",
        default="",
        metavar="FOLDER",
        help="a mounted Secret, in a folder with its name. Its files are HF_TOKEN for hf://; for s3:// they are "
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and if needed AWS_SESSION_TOKEN, AWS_REGION and AWS_ENDPOINT_URL",
    )
    fetch.add_argument("--adapter", default="", metavar="NAME", help="the name of the LoRA adapter that is fetched")
    fetch.add_argument(
        "--task",
        default=os.environ.get("CONVEYOR_ENGINE_TASK", "auto"),
        help="the task of the engine that will serve the model, auto or none (another program serves it). A model that "
        "the engine cannot run is rejected before its weights are downloaded. Default: CONVEYOR_ENGINE_TASK, or auto",
    )
    check = commands.add_parser(
        "check",
        help="parse the configuration of `serve`, or say whether the engine runs a model",
        description="Parse the configuration of `serve`, and end. With MODEL, say from the model's small files alone "
        "whether the engine runs it, and what memory it needs. The exit code is 1 if the engine rejects the model.",
    )
    check.add_argument(
        "of",
        nargs="?",
        metavar="MODEL",
        help="a folder, a GGUF file, hf://organisation/name[@revision], s3://bucket/prefix or organisation/name",
    )
    add_flags(check)
    commands.add_parser("version", help="print the version")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run a command.

    Returns the exit code: 0 after success, 1 if the engine died or cannot start, 2 if the configuration is wrong.
    """
    configure_logging()
    try:
        return _run(build_parser().parse_args(arguments))
    except StartError as error:
        _log.error("event=cannot_start reason=%s message=%s", error.reason, error)
        write_termination_message(error.reason, str(error))
        return 2 if isinstance(error, ConfigError) else 1
    finally:
        drop_unwritten()


def _run(flags: argparse.Namespace) -> int:
    if flags.command == "serve":
        return _serve(flags)
    if flags.command == "check" and flags.of:
        from conveyor_engine.preview.describe import describe

        runs, lines = describe(flags.of)
        print(*lines, sep="\n")
        return 0 if runs else 1
    if flags.command == "check":
        parse_config(vars(flags), os.environ)
        return 0
    if flags.command == "fetch":
        from conveyor_engine.fetching.fetch import fetch

        fetch(flags.uri, flags.target, flags.adapter, flags.task, flags.credentials)
        if not flags.adapter:
            write_facts(Path(flags.target))
    else:
        print(__version__)
    return 0


def _serve(flags: argparse.Namespace) -> int:
    from conveyor_engine.gguf.unpack import unpack
    from conveyor_engine.model_numbers import check_numbers
    from conveyor_engine.serving.preparing.jobs import ServedModel
    from conveyor_engine.serving.preparing.process import ForkServer
    from conveyor_engine.serving.preparing.sampling_defaults import SamplingDefaults, read_sampling_defaults
    from conveyor_engine.serving.preparing.trial import try_files
    from conveyor_engine.serving.server import serve
    from conveyor_engine.text.parsing.dialect import NONE, find_dialect
    from conveyor_engine.text.tokenizer import Tokenizer
    from conveyor_engine.wire.worker import ServedAdapter
    from conveyor_process.event_loop import run

    config = parse_config(vars(flags), os.environ)
    configure_logging(config.log_format)
    served_name = config.served_model_name or Path(config.model).resolve().name
    directory = unpack(Path(config.model))
    config = replace(config, model=str(directory))
    config = settle(config, find_task(config.task, directory))
    reads_text = load_about(config.task).reads_text
    if directory.is_dir():  # otherwise the tokenizer or the engine process raises the error
        try_files(directory, reads_text)
        check_numbers(directory)
    if config.draft_model is not None:
        with named("draft_model"):
            draft = unpack(Path(config.draft_model))
            try_files(draft, reads_text)
            check_numbers(draft)
        config = replace(config, draft_model=str(draft))
    defaults = read_sampling_defaults(directory) if config.sampling_defaults == "model" else SamplingDefaults()
    tokenizer = Tokenizer(directory) if reads_text else None
    dialect = find_dialect(
        tokenizer.chat_template_source if tokenizer else "", config.tool_parser, config.reasoning_parser
    )
    parsers = dialect.tool_format or NONE, dialect.thinking or NONE
    _log.info("event=dialect tool_parser=%s reasoning_parser=%s", *parsers)
    adapters = {name: ServedAdapter(number, at) for number, (name, at) in enumerate(config.adapters, start=1)}
    model = ServedModel(served_name, tokenizer, defaults, dialect, adapters=adapters)
    load_reader = partial(load(config.task, "reading"), directory) if load_about(config.task).reads else None
    death = run(serve(config, ForkServer(model, load_reader)))
    if death is None:
        return 0
    _log.error("event=engine_dead reason=%s message=%s", death.reason, death.message)
    write_termination_message(death.reason, death.message)
    return 1


if __name__ == "__main__":
    end_on_sigterm()
    sys.exit(main(sys.argv[1:]))
