"""`python -m e2e.clients [CLIENT...]`: the client matrix, on the cluster of KUBECONFIG; called by `make clients`.

With `--url`, `--model` and `--tokenizer`, an existing service is tried instead, with the clients of its `--task`.
"""

import argparse
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from e2e import kube
from e2e.clients.client import Client, Task
from e2e.clients.matrix import CLIENTS, PAGE_ORIGIN
from e2e.clients.reports import ClientFailed
from e2e.clients.runner import Target, run
from e2e.demo_model import CLASSIFIER, DEMO, PAINTER, PROGRAM, RERANKER, SCRIPT, SEEING, SPEECH, demo_model_directory
from e2e.deploy import install
from e2e.gateway import service_url
from e2e.services import CLAIM, provide_demo_model, provide_namespace, remove_demo_model, service

MODELS: dict[Task, str] = {  # the folder of each task's model; the demo's model embeds too, with its last token's state
    "generate": DEMO, "embed": DEMO, "rerank": RERANKER, "classify": CLASSIFIER,
    "compute": PROGRAM, "transcribe": SPEECH, "paint": PAINTER, "see": SEEING,
    "script": SCRIPT,
}  # fmt: skip


def _service(name: str, task: Task, task_name: str) -> dict[str, Any]:
    uri = f"pvc://{CLAIM}/{MODELS[task]}"
    return service(name, task=task_name, model={"uri": uri}, batching={}, kvCache={})


SERVICES: dict[Task, dict[str, Any]] = {
    "generate": service("clients"),
    "embed": _service("embeddings", "embed", "Embed"),
    "rerank": _service("ranks", "rerank", "Rerank"),
    "classify": _service("labels", "classify", "Classify"),
    "compute": _service("tensors", "compute", "Custom"),
    "transcribe": _service("speech", "transcribe", "Transcribe"),
    "paint": _service("pictures", "paint", "ImageGenerate"),
    "see": _service("sight", "see", "Generate"),
    "script": _service("script", "script", "Generate"),
}


@contextmanager
def deployed() -> Iterator[dict[Task, Target]]:
    """Deploy a service of one replica for each task in a new namespace. The namespace is deleted afterwards."""
    kube.require_our_cluster()
    install(f"gateway.cors.allowedOrigins[0]={PAGE_ORIGIN}")
    namespace = f"clients-{uuid.uuid4().hex[:5]}"
    try:
        provide_namespace(namespace)
        folders = {task: demo_model_directory(name) for task, name in MODELS.items()}
        provide_demo_model(namespace)
        names = {task: str(body["metadata"]["name"]) for task, body in SERVICES.items()}
        for body in SERVICES.values():
            kube.apply(body, namespace)
        for name in names.values():
            kube.wait_ready(name, namespace)
        yield {task: Target(service_url(name, namespace), name, folders[task]) for task, name in names.items()}
    finally:
        kube.kubectl("delete", "infsvc", "--all", "-n", namespace, "--timeout=60s")
        kube.kubectl("delete", "namespace", namespace, "--wait=false")
        remove_demo_model(namespace)


def try_all(clients: list[Client], targets: dict[Task, Target]) -> bool:
    """Run the clients. Prints a row for each, as in docs/openai-api.md. Returns whether all passed."""
    failures = []
    print("| client | version | run | passed |\n| --- | --- | --- | --- |", flush=True)
    for client in clients:
        started = time.monotonic()
        try:
            passed = run(client, targets[client.task])
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
    parser.add_argument("--task", choices=list(SERVICES), default="generate", help="what it does; default: generate")
    options = parser.parse_args()
    known = {client.name: client for client in CLIENTS}
    if unknown := [name for name in options.clients if name not in known]:
        parser.error(f"no client is called {', '.join(unknown)}; there are {', '.join(known)}")
    chosen = [known[name] for name in options.clients] or list(CLIENTS)
    if not options.url:
        with deployed() as targets:
            return 0 if try_all(chosen, targets) else 1
    if not (options.model and options.tokenizer):
        parser.error("--url needs --model and --tokenizer")
    target = Target(options.url.rstrip("/"), options.model, options.tokenizer.resolve())
    return 0 if try_all([client for client in chosen if client.task == options.task], {options.task: target}) else 1


if __name__ == "__main__":
    with kube.errors_in_words():
        raise SystemExit(main())
