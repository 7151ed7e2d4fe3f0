"""Runs a benchmark: `python -m conveyor_bench COMMAND`. Each benchmark is a command with its own options. START HERE.

Run it from the repository's root: measurements of the control plane use the real control plane of `e2e` and `tests`.
A command's module is imported only when the command runs, because the GPU suite runs where few packages are installed.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

from conveyor_bench.processes import end_in_order
from conveyor_engine.openmp import spin_briefly


class Command(NamedTuple):
    """A module with `main(arguments)`, and a line of help."""

    module: str
    help: str


COMMANDS = {
    "engine": Command("engine.command", "the engine's tokens per second, alone or in turns with a peer"),
    "modes": Command("modes.command", "the batching modes on Anyscale's requests, in virtual time and measured"),
    "embed-modes": Command("modes.embeddings", "the batching modes with embeddings: window and size, in virtual time"),
    "paint-modes": Command("modes.painting", "the batching modes with pictures that arrive at random"),
    "paint-served": Command(
        "modes.painting_served", "pictures in time over HTTP, beside diffusers' pipeline behind LitServe"
    ),
    "speech": Command("modes.transcribing", "the batching modes with audio files, and throughput beside other systems"),
    "batchers": Command("batchers.command", "dynamic batchers over HTTP: this engine and its peers, at the same rates"),
    "objectives": Command(
        "objectives.command", "objectives for latency under five shapes of traffic, against fixed limits"
    ),
    "host": Command("engine.host", "what a step costs the host, and streams over HTTP, without a model"),
    "start": Command("engine.start", "how long an engine takes to be ready, and what it streams first"),
    "constrained": Command(
        "engine.constrained", "what following a JSON schema costs 32 rows, beside as many free ones"
    ),
    "schemas": Command("engine.schemas", "which JSON schemas of files the engine follows, and validity of answers"),
    "adapters": Command("engine.adapters", "what LoRA adapters cost a batch, one for all rows or several"),
    "speculation": Command("engine.speculation", "what drafts of next tokens save, on texts that repeat and others"),
    "speculation-peers": Command(
        "engine.speculation_peers", "what drafts save here, in vLLM and in llama.cpp, on the same texts"
    ),
    "adapter-slots": Command("engine.adapter_slots", "the first token with more LoRA adapters than slots"),
    "gpu": Command("gpu.suite", "everything that is measured on a GPU, stage by stage"),
    "gateway": Command("gateway.command", "latency that the gateway adds, streams and requests per second"),
    "gateway-beside": Command(
        "gateway.beside", "the gateway's processor time, beside the gateway of an earlier commit"
    ),
    "traces": Command("gateway.traces", "the processor time that traces cost gateway and engine"),
    "loop": Command("gateway.loop", "the gateway's event loop: worst input of each parser, and many services"),
    "prefixes": Command("gateway.prefixes", "prefix caches of several engines, with homes for prefixes and without"),
    "overload": Command("gateway.overload", "answers and waits at ten times the load that an engine can do"),
    "fairness": Command(
        "gateway.fairness", "what chat clients get beside one that floods a service with long requests"
    ),
    "offline": Command("gateway.offline", "live requests beside an offline job, and what the job gets done"),
    "reconcile": Command("control.reconcile", "the operator's time, memory and calls with 200 services"),
    "wake": Command("control.wake", "how soon a service at zero gets a replica after a request"),
    "cycles": Command("control.cycles", "what 2,000 services that come and go leave in the programs"),
    "heavy-objects": Command(
        "control.heavy_objects", "what a tenant's deep and wide objects cost operator and gateway"
    ),
    "console": Command("control.console", "the console's memory and the time of its pages with 1,000 services"),
    "hostile": Command("hostile.gateway.command", "what others get of the gateway beside hostile clients"),
    "hostile-control": Command(
        "hostile.control.command", "what others get of the control plane beside a hostile tenant"
    ),
    "hostile-engine": Command("hostile.engine.command", "what others get of an engine beside a hostile client"),
}


def main(arguments: Sequence[str]) -> int:
    """Run a command and return its exit code: 1 if a figure misses its bar."""
    if not arguments or arguments[0] not in COMMANDS:
        parse(arguments)
    os.environ.update(spin_briefly(os.environ))  # as in an engine's process; before torch is loaded
    module = importlib.import_module(f"conveyor_bench.{COMMANDS[arguments[0]].module}")
    code: int = module.main(arguments[1:])
    return code


def parse(arguments: Sequence[str]) -> None:
    """Print the help or an error, and exit. Called if the first argument is not a command."""
    parser = argparse.ArgumentParser(
        prog="python -m conveyor_bench",
        description="Measure the parts of Conveyor. `COMMAND --help` lists a command's options.",
        epilog="\n".join(["commands:", *(f"  {name:16} {command.help}" for name, command in COMMANDS.items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="what to measure")
    parser.parse_args(arguments)
    parser.error("COMMAND comes first")


if __name__ == "__main__":
    end_in_order()
    sys.exit(main(sys.argv[1:]))
