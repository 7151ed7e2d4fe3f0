"""Finds the cluster for the operator, the gateway and the metrics server.

Each program calls `load_configuration` when it opens its connection. The places are tried in the order of
KUBECONFIG_MEANING. The Kubernetes client reads the files.
"""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import yaml
from kubernetes.aio import config
from kubernetes.aio.client import Configuration
from kubernetes.aio.config import incluster_config

from conveyor_process.proxies import find_proxy
from conveyor_process.settings import SettingsError

KUBECONFIG_MEANING: Final = "kubeconfig file; empty: $KUBECONFIG, else the pod's ServiceAccount, else ~/.kube/config"
# Errors that the Kubernetes client raises for an invalid kubeconfig.
_UNREADABLE: Final = (config.ConfigException, OSError, ValueError, TypeError, yaml.YAMLError)


async def load_configuration(kubeconfig: str) -> Configuration:
    """Return server and credentials. `kubeconfig`: the setting's value. Raises SettingsError.

    With the pod's ServiceAccount, no proxy is used: the API server's address belongs to the cluster.
    """
    configuration = Configuration(connection_pool_maxsize=0)  # no limit: every watch keeps a connection
    path = find_kubeconfig(kubeconfig, os.environ)
    try:
        if path:
            await config.load_kube_config(path, client_configuration=configuration, persist_config=False)
            configuration.proxy = configuration.proxy or find_proxy(str(configuration.host))
        else:
            config.load_incluster_config(client_configuration=configuration, try_refresh_token=False)
            configuration.refresh_api_key_hook = _read_token
    except _UNREADABLE as error:
        words = " ".join(str(error).split())
        found = path or "the ServiceAccount"
        raise SettingsError(f"cannot connect to Kubernetes: {found}: {words}; set --kubeconfig") from error
    # Otherwise aiohttp would look for a proxy and for ~/.netrc before each call, both in a thread.
    configuration.client_session_kwargs = {"trust_env": False}
    return configuration


def _read_token(configuration: Configuration) -> None:
    """Read the pod's token before each call. The client would wait for a minute of a clock that may step back."""
    with contextlib.suppress(OSError):
        if token := Path(incluster_config.SERVICE_TOKEN_FILENAME).read_text():
            configuration.api_key["BearerToken"] = f"bearer {token}"


def find_kubeconfig(given: str, environment: Mapping[str, str]) -> str:
    """Return the path of the file, or several paths in the format of KUBECONFIG; "" for the pod's ServiceAccount.

    given: the setting's value. Raises SettingsError if no file exists.
    """
    paths = given or environment.get("KUBECONFIG", "")
    if not paths and environment.get("KUBERNETES_SERVICE_HOST"):
        return ""
    paths = paths or "~/.kube/config"
    if not any(os.path.exists(os.path.expanduser(path)) for path in paths.split(os.pathsep)):
        raise SettingsError(f"cannot connect to Kubernetes: {paths} is not a file; set --kubeconfig")
    return paths
