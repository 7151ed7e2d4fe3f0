"""Builds the environment variables of the containers of engines. Pure.

If a proxy is set, names of the cluster are exempt from it, because no proxy outside the cluster knows them.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Final

from conveyor_api import names
from conveyor_api.env import EnvVar
from conveyor_api.spec import InferenceServiceSpec
from conveyor_operator.loop.owner import Object

_HOME: Final = {"HOME": "/tmp"}  # for compilers' caches; in most images, the pod's user has no home
_OF_ONE_IMAGE = re.compile("PATH|PYTHON.*|LD_.*")
_PROXIES: Final = frozenset(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"))
_EXEMPT: Final = ("NO_PROXY", "no_proxy")


def select_for_fetch(spec: InferenceServiceSpec) -> list[EnvVar]:
    """Return the user's variables for the download, without those that locate programs in vLLM's image."""
    if spec.runtime != "VLLM":
        return spec.pod.env
    return [variable for variable in spec.pod.env if not _OF_ONE_IMAGE.fullmatch(variable.name)]


def build_environment(given: Sequence[EnvVar], more: list[Object], defaults: Mapping[str, str]) -> list[Object]:
    """Merge variables. Conveyor's own override those of the user, which override the defaults. No name is repeated."""
    ours = [{"name": names.TERMINATION_LOG_ENV, "value": names.TERMINATION_LOG_PATH}, *more]
    taken = {variable["name"] for variable in ours}
    theirs = [variable.to_manifest() for variable in given]
    result = [variable for variable in theirs if variable["name"] not in taken] + ours
    set_names = {variable["name"] for variable in result}
    return result + [
        {"name": name, "value": value} for name, value in {**_HOME, **defaults}.items() if name not in set_names
    ]


def exempt_cluster(container: Object, cluster_domain: str) -> Object:
    """Return the container with the names of the cluster in its NO_PROXY, if it has a proxy.

    A NO_PROXY from a Secret or a ConfigMap stays as it is.
    """
    variables: list[Object] = container["env"]
    if not any(variable["name"].upper() in _PROXIES for variable in variables):
        return container
    local = ["127.0.0.1", "localhost", ".svc", f".{cluster_domain}"]
    if not any(variable["name"] in _EXEMPT for variable in variables):
        return {**container, "env": [*variables, {"name": "NO_PROXY", "value": ",".join(local)}]}
    return {**container, "env": [_add_to(variable, local) for variable in variables]}


def _add_to(variable: Object, local: Sequence[str]) -> Object:
    if variable["name"] not in _EXEMPT or "value" not in variable:
        return variable
    exempt = [entry.strip() for entry in variable["value"].split(",") if entry.strip()]
    return {**variable, "value": ",".join([*exempt, *(entry for entry in local if entry not in exempt)])}
