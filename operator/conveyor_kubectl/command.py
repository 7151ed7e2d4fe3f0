"""Flags in, text or JSON out. The one place that prints."""

import argparse
import json
import sys
from collections.abc import Sequence

from conveyor_kubectl.cluster import Cluster, Unanswered
from conveyor_kubectl.explaining import explain
from conveyor_kubectl.facts import read_facts
from conveyor_kubectl.prerequisites import Verdict, check
from conveyor_kubectl.words import build_findings, build_json, build_text

_EXPLAIN = """Say how an InferenceService scales at this moment: each metric with its value, its target and the replicas
that it asks for, which one wins, and what becomes of it, by the arithmetic of the HorizontalPodAutoscaler's controller.
Where that depends on what the controller remembers of former looks, its own word counts."""

_CHECK = """Say what the cluster has of what Conveyor needs, before it is installed. Nothing is written. It ends with 1
where something is missing."""


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
    return parser


def _explain(cluster: Cluster, flags: argparse.Namespace) -> int:
    explanation = explain(read_facts(cluster, flags.namespace or cluster.namespace, flags.name))
    print(json.dumps(build_json(explanation), indent=2) if flags.output == "json" else build_text(explanation))
    return 0


def _check(cluster: Cluster) -> int:
    findings = list(check(cluster))
    print(build_findings(findings))
    return 1 if any(finding.verdict is Verdict.MISSING for finding in findings) else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 1 where the cluster does not answer the question, or lacks what it should have."""
    flags = build_parser().parse_args(arguments)
    try:
        cluster = Cluster(flags.kubeconfig, flags.context)
        return _check(cluster) if flags.command == "check" else _explain(cluster, flags)
    except Unanswered as error:
        print(f"kubectl conveyor: {error}", file=sys.stderr)
        return 1
