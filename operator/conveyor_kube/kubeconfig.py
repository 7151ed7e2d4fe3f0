"""Which cluster the operator, the gateway and the metrics server talk to: one rule, that of client-go.

Called where each of them loads its credentials. Knows the rule only: the Kubernetes client reads the files.
"""

import os
from collections.abc import Mapping
from typing import Final

import yaml

from conveyor_process.settings import SettingsError

KUBECONFIG_MEANING: Final = "kubeconfig file; empty: $KUBECONFIG, else the pod's ServiceAccount, else ~/.kube/config"
UNREADABLE: Final = (OSError, ValueError, TypeError, yaml.YAMLError)
"""What the Kubernetes client lets through, besides its own ConfigException, of a file that is no kubeconfig."""


def find_kubeconfig(given: str, environment: Mapping[str, str]) -> str:
    """The file, or several as KUBECONFIG names them; empty for the pod's ServiceAccount.

    `given` is the setting. Raises SettingsError if nothing is there.
    """
    paths = given or environment.get("KUBECONFIG", "")
    if not paths and environment.get("KUBERNETES_SERVICE_HOST"):
        return ""
    paths = paths or "~/.kube/config"
    if not any(os.path.exists(os.path.expanduser(path)) for path in paths.split(os.pathsep)):
        raise SettingsError(f"no Kubernetes to talk to: {paths} is no file; set --kubeconfig")
    return paths


def no_kubernetes(path: str, error: Exception) -> SettingsError:
    """The client's complaint about what `find_kubeconfig` found, as one sentence."""
    words = " ".join(str(error).split())
    return SettingsError(f"no Kubernetes to talk to: {path or 'the ServiceAccount'}: {words}; set --kubeconfig")
