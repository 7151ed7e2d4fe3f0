"""`python -m e2e.clients [CLIENT...]`: the client matrix, on the cluster of KUBECONFIG; called by `make clients`.

`--url`, `--model` and `--tokenizer` try a service that is there already instead.
"""

import argparse
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from e2e import kube
from e2e.clients.matrix import CLIENTS, Client
from e2e.clients.reports import ClientFailed
from e2e.clients.runner import Target, run
from e2e.demo_model import demo_model_directory
from e2e.gateway import service_url
from e2e.services import provide_demo_model, provide_namespace, remove_demo_model, service

NAME = "clients"


@contextmanager
def deployed() -> Iterator[Target]:
    """A service of one replica in a namespace of its own, which goes afterwards."""
    kube.require_our_cluster()
    namespace = f"clients-{uuid.uuid4().hex[:5]}"
    try:
        provide_namespace(namespace)
        provide_demo_model(namespace)
        kube.apply(service(NAME), namespace)
        kube.wait_ready(NAME, namespace)
        yield Target(service_url(NAME, namespace), NAME, demo_model_directory())
    finally:
        kube.kubectl("delete", "infsvc", "--all", "-n", namespace, "--timeout=60s")
        kube.kubectl("delete", "namespace", namespace, "--wait=false")
        remove_demo_model(namespace)


def try_all(clients: list[Client], target: Target) -> bool:
    """Prints a row for each, as docs/openai-api.md has it; whether all passed."""
    failures = []
    print("| client | version | run | passed |\n| --- | --- | --- | --- |", flush=True)
    for client in clients:
        started = time.monotonic()
        try:
            passed = run(client, target)
        except ClientFailed as error:
            failures.append(f"{client.name}: {error}")
            passed = "FAILED"
        print(f"| {client.name} | {client.version} | {client.ran} | {passed} |", flush=True)
        print(f"  ({time.monotonic() - started:.0f} s)", flush=True)
    print("\n\n".join(["", *failures]))
    return not failures


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m e2e.clients", description=__doc__)
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help="their names; default: all")
    parser.add_argument("--url", help="OpenAI base URL, ending in /v1; default: a new service on the cluster")
    parser.add_argument("--model", help="its model's name")
    parser.add_argument("--tokenizer", type=Path, help="folder of its tokenizer")
    options = parser.parse_args()
    known = {client.name: client for client in CLIENTS}
    if unknown := [name for name in options.clients if name not in known]:
        parser.error(f"no client is called {', '.join(unknown)}; there are {', '.join(known)}")
    chosen = [known[name] for name in options.clients] or list(CLIENTS)
    if not options.url:
        with deployed() as target:
            return 0 if try_all(chosen, target) else 1
    if not (options.model and options.tokenizer):
        parser.error("--url needs --model and --tokenizer")
    return 0 if try_all(chosen, Target(options.url.rstrip("/"), options.model, options.tokenizer.resolve())) else 1


if __name__ == "__main__":
    with kube.errors_in_words():
        raise SystemExit(main())
