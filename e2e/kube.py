"""kubectl and helm as functions, for the demo and the stories.

Everything the stories know of a cluster is its KUBECONFIG. `require_our_cluster` refuses any context
but the two that `e2e.cluster` makes, so that no story ever runs on somebody's real cluster.
"""

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from e2e.cluster import programs
from e2e.cluster.images import ImageMissing
from e2e.cluster.tools import ProgramMissing

OUR_CONTEXTS = ("conveyor-local", "kind-conveyor")
SYSTEM_NAMESPACE = "conveyor-system"
MANIFESTS = Path(__file__).parents[1] / "examples"

Object = dict[str, Any]
T = TypeVar("T")


class CommandFailed(Exception):
    """A command ended with a code other than 0; the message is what it printed."""


@contextlib.contextmanager
def errors_in_words() -> Iterator[None]:
    """End the program with one sentence instead of a traceback, after an error that a person can fix."""
    try:
        yield
    except (ProgramMissing, ImageMissing, CommandFailed) as error:
        raise SystemExit(str(error)) from None


def kubectl(*arguments: str, stdin: str | None = None, timeout_seconds: float = 180) -> str:
    return _run("kubectl", *arguments, stdin=stdin, timeout_seconds=timeout_seconds)


@contextlib.contextmanager
def in_background(*arguments: str) -> Iterator[None]:
    """Run kubectl while the block runs, and then wait for its end."""
    with ThreadPoolExecutor(1) as thread:
        command = thread.submit(kubectl, *arguments)
        yield
        command.result()


def helm(*arguments: str) -> str:
    return _run("helm", *arguments, timeout_seconds=300)


def _run(*command: str, stdin: str | None = None, timeout_seconds: float = 180) -> str:
    """Run a program and return its output. Raises CommandFailed with its message."""
    done = programs.run(*command, input=stdin, capture_output=True, text=True, timeout=timeout_seconds)
    if done.returncode != 0:
        raise CommandFailed(f"{' '.join(command)}\n{done.stdout}{done.stderr}".strip())
    return str(done.stdout)


def get(kind: str, name: str, namespace: str | None = None) -> Object | None:
    """One object as kubectl sees it, or None."""
    where = ("-n", namespace) if namespace else ()
    text = kubectl("get", kind, name, *where, "-o", "json", "--ignore-not-found")
    return json.loads(text) if text.strip() else None


def list_(kind: str, namespace: str, selector: str | None = None) -> list[Object]:
    extra = ("-l", selector) if selector else ()
    items: list[Object] = json.loads(kubectl("get", kind, "-n", namespace, *extra, "-o", "json"))["items"]
    return items


def apply(manifest: Object | list[Object], namespace: str | None = None) -> None:
    """Apply objects with server-side apply. Takes over fields that others manage."""
    objects = manifest if isinstance(manifest, list) else [manifest]
    where = ("-n", namespace) if namespace else ()
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
    kubectl("apply", "--server-side", "--force-conflicts", *where, "-f", "-", stdin=text)


def condition(obj: Object | None, kind: str) -> Object:
    """The condition of that type, or an empty one."""
    conditions = ((obj or {}).get("status") or {}).get("conditions") or []
    return next((c for c in conditions if c["type"] == kind), {})


def wait_until(what: str, probe: Callable[[], T | None], timeout_seconds: float = 240) -> T:
    """Call `probe` twice a second until its result is true. The error says what did not happen."""
    end = time.monotonic() + timeout_seconds
    last: T | None = None
    while time.monotonic() < end:
        last = probe()
        if last:
            return last
        time.sleep(0.5)
    raise TimeoutError(f"after {timeout_seconds:g} s still not: {what}; last seen: {last!r}")


def wait_ready(name: str, namespace: str) -> None:
    condition = "--for=condition=Ready"
    kubectl("wait", f"infsvc/{name}", "-n", namespace, condition, "--timeout=240s", timeout_seconds=250)


def current_context() -> str:
    return kubectl("config", "current-context").strip()


def require_our_cluster() -> None:
    """Refuse every cluster that `e2e.cluster` did not make."""
    if not os.environ.get("KUBECONFIG"):
        raise SystemExit('KUBECONFIG is not set. Run "make cluster" and export what it prints.')
    context = current_context()
    if context not in OUR_CONTEXTS:
        raise SystemExit(f"the context is {context!r}; only {' and '.join(OUR_CONTEXTS)} are used here")


def kubeconfig_path() -> str:
    return os.environ["KUBECONFIG"]
