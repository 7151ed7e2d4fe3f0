"""Parses the flags of `conveyor run`, sets up the log, and runs. Prints a RunError as one sentence."""

import argparse
import logging
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from conveyor_api.text import make_printable
from conveyor_local.errors import RunError
from conveyor_process.event_loop import run as run_in_loop
from conveyor_process.log import set_up_log
from conveyor_process.running import end_on_sigterm

_RUN = """Serve the InferenceServices of files on this machine, without a cluster. The same manifests run on a cluster
unchanged: the gateway, the engines, their configuration and the arithmetic of scaling are the same. Models are kept in
the cache. Jobs of conveyor_jobs in the files run to their end. Ctrl-C drains as a pod does; a second one ends at
once."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="conveyor", allow_abbrev=False)
    parser.description = "Serve models in batches on this machine, from the manifests of a cluster."
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="serve the InferenceServices of files", description=_RUN)
    run.add_argument("files", nargs="+", metavar="FILE", help="YAML files, folders of them, or - for standard input")
    run.add_argument(
        "-n", "--namespace", default="default", help="namespace of objects that name none (default: %(default)s)"
    )
    run.add_argument(
        "--volume", action="append", default=[], metavar="NAME=DIR", type=_parse_volume,
        help="folder in place of the claim NAME, for models with pvc://NAME/... and for jobs; repeatable",
    )  # fmt: skip
    run.add_argument(
        "--host", default="127.0.0.1",
        help="address to listen on for clients; 0.0.0.0: all (default: %(default)s)",
    )  # fmt: skip
    run.add_argument("--port", type=_parse_port, default=8000, help="port of the gateway (default: %(default)s)")
    run.add_argument("--no-autoscaling", action="store_true", help="keep the first number of engines of each service")
    run.add_argument(
        "--sync-period", type=_parse_seconds, default=5.0, metavar="SECONDS",
        help="time between two decisions of the autoscaler (default: %(default)s)",
    )  # fmt: skip
    run.add_argument(
        "--ask",
        default="",
        metavar="TEXT",
        help="once ready, ask the first service this, and print its answer",
    )
    run.add_argument(
        "--load", type=_parse_clients, default=0, metavar="CLIENTS",
        help="once ready, send the first service a burst of this many clients until its engines have scaled up, and "
        "draw a picture of it",
    )  # fmt: skip
    run.add_argument(
        "--picture", type=Path, default=Path("conveyor-load.svg"), metavar="FILE",
        help="where --load draws its picture (default: %(default)s)",
    )  # fmt: skip
    run.add_argument(
        "--until-done", action="store_true",
        help="end when jobs, --ask and --load have ended; the exit code is 1 if one of them failed",
    )  # fmt: skip
    run.add_argument(
        "--cache", type=Path, metavar="DIR", help="folder of models and logs (default: $CONVEYOR_CACHE, else "
        "~/.cache/conveyor)",
    )  # fmt: skip
    run.add_argument("--verbose", action="store_true", help="print the logs of the gateway, the engines and the jobs")
    return parser


def _parse_volume(text: str) -> tuple[str, Path]:
    name, equals, folder = text.partition("=")
    if not (name and equals and folder):
        raise argparse.ArgumentTypeError(f"must be NAME=DIR, not {text!r}")
    return name, Path(folder)


def _parse_port(text: str) -> int:
    if not re.fullmatch("[0-9]{1,5}", text) or not 1024 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"must be a port from 1024 to 65535, not {text!r}")
    return int(text)


def _parse_seconds(text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,3})?", text) or float(text) < 0.1:
        raise argparse.ArgumentTypeError(f"must be seconds from 0.1 to 9999, not {text!r}")
    return float(text)


def _parse_clients(text: str) -> int:
    if not re.fullmatch("[0-9]{1,4}", text) or not 1 <= int(text) <= 1000:
        raise argparse.ArgumentTypeError(f"must be a number from 1 to 1000, not {text!r}")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program. Returns its exit code: 0, 1 for an error of the run, 2 if files or flags are wrong."""
    end_on_sigterm()
    given = build_parser().parse_args(arguments)
    try:
        return _run(given)
    except RunError as error:
        print(f"conveyor run: {make_printable(str(error))}", file=sys.stderr)
        return error.code


def _run(given: argparse.Namespace) -> int:
    from conveyor_local.files import read_objects
    from conveyor_local.places import find_cache
    from conveyor_local.running import Flags, Run
    from conveyor_local.screen import Screen

    objects = read_objects(given.files, given.namespace)
    flags = Flags(
        host=given.host,
        port=given.port,
        cache=given.cache or find_cache(os.environ),
        volumes=dict(given.volume),
        autoscales=not given.no_autoscaling,
        sync_seconds=given.sync_period,
        question=given.ask,
        load=given.load,
        picture=given.picture,
        until_done=given.until_done,
        verbose=given.verbose,
    )
    run = Run(objects, flags, Screen())
    with (run.places.state / "gateway.log").open("w") as log:
        set_up_log("INFO", "logfmt", stream=log)
        try:
            return run_in_loop(run.go())
        finally:
            logging.root.handlers.clear()
