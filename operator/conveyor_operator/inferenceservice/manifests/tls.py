"""Adds TLS to the pod template of engines: the Secret, the program's setting, the port's name, the probes. Pure."""

import copy
from typing import Final

from conveyor_api import names
from conveyor_operator.inferenceservice.manifests.vllm import read_over_tls
from conveyor_operator.loop.owner import Object

_FOLDER: Final = "/etc/conveyor-tls"
_VOLUME: Final = "conveyor-tls"
_PROBES: Final = ("startupProbe", "readinessProbe", "livenessProbe")
# vLLM reads the files again when they change.
_VLLM_FLAGS: Final = (f"--ssl-certfile={_FOLDER}/tls.crt", f"--ssl-keyfile={_FOLDER}/tls.key", "--enable-ssl-refresh")


def with_tls(template: Object, secret: str, runtime: str) -> Object:
    """Return the pod template with engines that serve TLS with this Secret. The kubelet does not verify them."""
    template = copy.deepcopy(template)
    (engine,) = template["spec"]["containers"]
    template["spec"]["volumes"].append({"name": _VOLUME, "secret": {"secretName": secret}})
    engine["volumeMounts"].append({"name": _VOLUME, "mountPath": _FOLDER, "readOnly": True})
    engine["ports"][0]["name"] = names.ENGINE_TLS_PORT_NAME
    for probe in _PROBES:
        engine[probe]["httpGet"] |= {"port": names.ENGINE_TLS_PORT_NAME, "scheme": "HTTPS"}
    if runtime == "VLLM":
        engine["command"] += _VLLM_FLAGS
        pre_stop = engine["lifecycle"]["preStop"]["exec"]["command"]
        pre_stop[2] = read_over_tls(pre_stop[2])
    else:
        engine["env"].append({"name": f"{names.ENGINE_ENV_PREFIX}TLS_FOLDER", "value": _FOLDER})
    return template
