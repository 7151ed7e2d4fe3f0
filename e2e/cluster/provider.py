"""Chooses the provider that a command uses.

CLUSTER=local|kind decides. Otherwise it is the provider whose cluster is up, so `make demo-url` finds the cluster of
`make demo CLUSTER=local`. If none is up, it is `kind` if a Docker daemon and kind work, otherwise `local`. Called by
the command line. Knows no internals of a provider.
"""

import os
from types import ModuleType

from e2e.cluster import kind, local, programs

PROVIDERS = {"local": local, "kind": kind}


class ContextRefused(RuntimeError):
    """KUBECONFIG names a cluster that this package has not made."""


def addressed() -> ModuleType:
    if chosen := os.environ.get("CLUSTER"):
        return PROVIDERS[chosen]
    for provider in PROVIDERS.values():
        if provider.running():
            return provider
    return kind if kind.is_requested() else local


def existing() -> list[ModuleType]:
    """Return the providers that have a cluster, intact or not. With CLUSTER, only that provider."""
    if chosen := os.environ.get("CLUSTER"):
        return [PROVIDERS[chosen]]
    return [provider for provider in PROVIDERS.values() if provider.exists()]


def builds_with_docker() -> bool:
    """Return whether Docker builds the images. kind's nodes need that, and so do users who are not root."""
    return addressed() is kind or (os.geteuid() != 0 and kind.docker_answers())


def of_kubeconfig() -> ModuleType:
    """Return the provider of KUBECONFIG's cluster; without KUBECONFIG, the chosen provider."""
    if not os.environ.get("KUBECONFIG"):
        return addressed()
    context = programs.run("kubectl", "config", "current-context", capture_output=True, text=True).stdout.strip()
    for provider in PROVIDERS.values():
        if context == provider.CONTEXT:
            return provider
    raise ContextRefused(f"the context of KUBECONFIG is {context!r}, which `make cluster` did not make")
