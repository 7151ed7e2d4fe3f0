"""Parses the flags, runs the command, and prints text or JSON.

Other modules print through this one, except `simulating` and the progress bar of `tuning`.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from functools import cache, partial
from typing import TextIO

from conveyor_api.text import make_printable
from conveyor_insight.explaining import explain
from conveyor_insight.facts import Unanswered, read_facts
from conveyor_kubectl import advising, families, keys, rolling_back, tuning, usage, why
from conveyor_kubectl.cluster import Cluster
from conveyor_kubectl.prerequisites import Verdict, check
from conveyor_kubectl.rolling_back import find_lost
from conveyor_kubectl.simulating import DESCRIPTION, EPILOG, add_flags, simulate
from conveyor_kubectl.words import build_findings, build_json, build_text

_EXPLAIN = """Show why an InferenceService has its number of replicas: the value and target of each metric, the replicas
that it calls for, and what the HorizontalPodAutoscaler decides. The command repeats the arithmetic of the
HorizontalPodAutoscaler's controller. Where a decision depends on the controller's history, the command shows what the
controller reports."""

_CHECK = """Check whether a cluster has what Conveyor needs, before you install it. The command creates nothing. The
exit code is 1 if something is missing."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kubectl conveyor", description=__doc__, allow_abbrev=False)
    parser.description = (
        "Explain, simulate and tune how Conveyor scales and batches. Manage keys. Check a cluster before installing."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    explaining = commands.add_parser(
        "explain", help="show why a service has its number of replicas", description=_EXPLAIN
    )
    explaining.add_argument(
        "-o", "--output", choices=["text", "json"], default="text", help="format (default: %(default)s)"
    )
    tuned = commands.add_parser(
        "tune",
        help="measure batch limits, windows and step budgets",
        description=tuning.DESCRIPTION,
        epilog=tuning.EPILOG,
    )
    advised = commands.add_parser(
        "advise", help="recommend a batching mode and a batch limit", description=advising.DESCRIPTION
    )
    advising.add_arguments(advised)
    for command in (explaining, tuned, advised):
        command.add_argument("name", metavar="NAME", help="name of the InferenceService")
        command.add_argument("-n", "--namespace", help="namespace of the service (default: the context's)")
    tuning.add_arguments(tuned)
    checking = commands.add_parser("check", help="check whether a cluster has what Conveyor needs", description=_CHECK)
    going_back = commands.add_parser(
        "rollback-check", help="show which fields a rollback would drop", description=rolling_back.DESCRIPTION
    )
    going_back.add_argument(
        "manifests",
        metavar="FILE",
        nargs="?",
        default="-",
        help="manifests of the older release (default: standard input)",
    )
    used = commands.add_parser("usage", help="show what callers have used", description=usage.DESCRIPTION)
    usage.add_arguments(used)
    asked_why = commands.add_parser("why", help="show where the time of a request went", description=why.DESCRIPTION)
    why.add_arguments(asked_why)
    keyed = commands.add_parser("key", help="create, list, rotate and revoke keys", description=keys.DESCRIPTION)
    for command in (explaining, checking, tuned, advised, going_back, used, asked_why, *keys.add_commands(keyed)):
        command.add_argument(
            "--kubeconfig", metavar="FILE", help="kubeconfig file (default: $KUBECONFIG, else ~/.kube/config)"
        )
        command.add_argument("--context", metavar="NAME", help="context of the kubeconfig (default: current)")
    listing = commands.add_parser("models", help="list tested families of models", description=families.DESCRIPTION)
    listing.add_argument("word", metavar="WORD", nargs="?", default="", help="list only families that contain it")
    simulating = commands.add_parser(
        "simulate", help="simulate the autoscaler under a load", description=DESCRIPTION, epilog=EPILOG
    )
    add_flags(simulating)
    return parser


def _explain(cluster: Cluster, flags: argparse.Namespace) -> int:
    explanation = explain(read_facts(cluster, flags.namespace or cluster.namespace, flags.name))
    _print(json.dumps(build_json(explanation), indent=2) if flags.output == "json" else build_text(explanation))
    return 0


def _check(cluster: Cluster) -> int:
    findings = list(check(cluster))
    _print(build_findings(findings))
    return 1 if any(finding.verdict is Verdict.MISSING for finding in findings) else 0


def _check_rollback(cluster: Cluster, flags: argparse.Namespace) -> int:
    lost = find_lost(cluster, flags.manifests)
    _print("\n".join(lost) or "no field in use would be dropped, and all values are allowed")
    return 1 if lost else 0


def _list_families(flags: argparse.Namespace) -> int:
    lines = list(families.list_families(flags.word))
    _print("\n".join(lines) or f"no tested family contains {flags.word}")
    return 0 if lines else 1


def _print(text: str, file: TextIO | None = None) -> None:
    """Print text.

    Control characters are made printable, because parts of `text` come from objects that tenants write.
    """
    print(*map(make_printable, text.split("\n")), sep="\n", file=file)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program.

    Returns the command's exit code, or 1 after an `Unanswered` error, which is printed.
    """
    flags = build_parser().parse_args(arguments)
    if flags.command == "simulate":
        return simulate(flags)
    if flags.command == "models":
        return _list_families(flags)
    try:
        connect = cache(partial(Cluster, flags.kubeconfig, flags.context))
        match flags.command:
            case "check":
                return _check(connect())
            case "rollback-check":
                return _check_rollback(connect(), flags)
            case "key":
                return keys.run(connect, flags, _print)
            case "why":
                return why.show_why(connect, flags, _print)
            case "usage":
                return usage.show(connect(), flags, _print)
            case "tune":
                return tuning.tune(connect(), flags, _print)
            case "advise":
                return advising.show_advice(connect(), flags, _print)
            case _:
                return _explain(connect(), flags)
    except Unanswered as error:
        _print(f"kubectl conveyor: {error}", sys.stderr)
        return 1
