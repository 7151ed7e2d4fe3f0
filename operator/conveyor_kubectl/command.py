"""Flags in, text or JSON out. The one place that prints."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import yaml

from conveyor_api.errors import InvalidResource
from conveyor_api.resource import InferenceService
from conveyor_api.text import make_printable
from conveyor_insight.explaining import explain
from conveyor_insight.facts import Unanswered, read_facts
from conveyor_insight.replaying import build_rules, read_moments, replay
from conveyor_kubectl.cluster import Cluster
from conveyor_kubectl.prerequisites import Verdict, check
from conveyor_kubectl.simulating import DESCRIPTION, EPILOG, add_flags, simulate
from conveyor_kubectl.words import build_findings, build_json, build_replay, build_text

_EXPLAIN = """Say how an InferenceService scales at this moment: each metric with its value, its target and the replicas
that it asks for, which one wins, and what becomes of it, by the arithmetic of the HorizontalPodAutoscaler's controller.
Where that depends on what the controller remembers of former looks, its own word counts."""

_CHECK = """Say what the cluster has of what Conveyor needs, before it is installed. Nothing is written. It ends with 1
where something is missing."""


_REPLAY = """Print what the HorizontalPodAutoscaler would have made of recorded moments: documents that explain -o json
printed, one after the other. No cluster is asked. What was in flight stays as it was recorded."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kubectl conveyor", description=__doc__, allow_abbrev=False)
    parser.description = "Questions to a cluster about Conveyor."
    commands = parser.add_subparsers(dest="command", required=True)
    explaining = commands.add_parser("explain", help="why a service has the replicas that it has", description=_EXPLAIN)
    explaining.add_argument("name", metavar="NAME", help="an InferenceService")
    explaining.add_argument("-n", "--namespace", help="its namespace; default: that of the context")
    explaining.add_argument("-o", "--output", choices=["text", "json"], default="text", help="default: %(default)s")
    checking = commands.add_parser("check", help="whether a cluster has what Conveyor needs", description=_CHECK)
    for command in (explaining, checking):
        command.add_argument("--kubeconfig", metavar="FILE", help="default: $KUBECONFIG, else ~/.kube/config")
        command.add_argument("--context", metavar="NAME", help="of the kubeconfig; default: its current one")
    replaying = commands.add_parser("replay", help="what another spec would have done", description=_REPLAY)
    replaying.add_argument("samples", metavar="FILE", type=Path, help="what explain -o json printed, again and again")
    replaying.add_argument(
        "--service", metavar="FILE", type=Path, help="an InferenceService to scale by; default: as it was then"
    )
    simulating = commands.add_parser(
        "simulate", help="what the autoscaler would do under a load", description=DESCRIPTION, epilog=EPILOG
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


def _replay(flags: argparse.Namespace) -> int:
    try:
        other = None if flags.service is None else build_rules(_read_service(flags.service))
        looks = list(replay(read_moments(flags.samples.read_text(encoding="utf-8")), other))
    except (OSError, ValueError, InvalidResource, yaml.YAMLError) as error:
        raise Unanswered(f"no replay: {error}") from error
    if not looks:
        raise Unanswered(f"no replay: {flags.samples} has no moment with an autoscaler")
    _print(build_replay(looks))
    return 0


def _print(text: str, file: TextIO | None = None) -> None:
    """Parts of `text` come from the cluster, where tenants write."""
    print(*map(make_printable, text.split("\n")), sep="\n", file=file)


def _read_service(path: Path) -> InferenceService:
    return InferenceService.parse(yaml.safe_load(path.read_text(encoding="utf-8")), known_only=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 1 where the cluster does not answer the question, or lacks what it should have."""
    flags = build_parser().parse_args(arguments)
    if flags.command == "simulate":
        return simulate(flags)
    try:
        if flags.command == "replay":
            return _replay(flags)
        cluster = Cluster(flags.kubeconfig, flags.context)
        return _check(cluster) if flags.command == "check" else _explain(cluster, flags)
    except Unanswered as error:
        _print(f"kubectl conveyor: {error}", sys.stderr)
        return 1
