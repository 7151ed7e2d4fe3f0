"""Flags in, text or JSON out. The one place that prints."""

import argparse
import json
import sys
from collections.abc import Sequence

from conveyor_kubectl.cluster import Cluster, Unanswered
from conveyor_kubectl.explaining import explain
from conveyor_kubectl.facts import read_facts
from conveyor_kubectl.words import build_json, build_text

_EXPLAIN = """Say how an InferenceService scales at this moment: each metric with its value, its target and the replicas
that it asks for, which one wins, and what becomes of it, by the arithmetic of the HorizontalPodAutoscaler's controller.
Where that depends on what the controller remembers of former looks, its own word counts."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kubectl conveyor", description=__doc__, allow_abbrev=False)
    parser.description = "Questions to a cluster that runs Conveyor."
    commands = parser.add_subparsers(dest="command", required=True)
    explaining = commands.add_parser("explain", help="why a service has the replicas that it has", description=_EXPLAIN)
    explaining.add_argument("name", metavar="NAME", help="an InferenceService")
    explaining.add_argument("-n", "--namespace", help="its namespace; default: that of the context")
    explaining.add_argument("-o", "--output", choices=["text", "json"], default="text", help="default: %(default)s")
    for command in (explaining,):
        command.add_argument("--kubeconfig", metavar="FILE", help="default: $KUBECONFIG, else ~/.kube/config")
        command.add_argument("--context", metavar="NAME", help="of the kubeconfig; default: its current one")
    return parser


def _explain(flags: argparse.Namespace) -> None:
    cluster = Cluster(flags.kubeconfig, flags.context)
    explanation = explain(read_facts(cluster, flags.namespace or cluster.namespace, flags.name))
    print(json.dumps(build_json(explanation), indent=2) if flags.output == "json" else build_text(explanation))


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 1 where the cluster does not answer the question."""
    flags = build_parser().parse_args(arguments)
    try:
        _explain(flags)
    except Unanswered as error:
        print(f"kubectl conveyor: {error}", file=sys.stderr)
        return 1
    return 0
