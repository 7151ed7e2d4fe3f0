"""Adds to engines who may use them: the ConfigMap with accounts and keys, and its mount in the pod template. Pure.

The kubelet updates the mounted file when the cluster's keys change, so no pod is replaced, and engines need no right.
"""

import copy
import json
from collections.abc import Sequence

from conveyor_api import names
from conveyor_kube.issuer import Issuer
from conveyor_operator.loop.owner import Object, Owner, build_metadata


def with_callers(template: Object, owner: Owner) -> Object:
    """Return the pod template with engines that answer only the callers of `build_callers`."""
    template = copy.deepcopy(template)
    (engine,) = template["spec"]["containers"]
    volume = {"name": names.CALLERS_VOLUME, "configMap": {"name": names.callers_name(owner.name)}}
    mount = {"name": names.CALLERS_VOLUME, "mountPath": names.CALLERS_PATH.rpartition("/")[0], "readOnly": True}
    template["spec"]["volumes"].append(volume)
    engine["volumeMounts"].append(mount)
    engine["env"].append({"name": f"{names.ENGINE_ENV_PREFIX}CALLERS_FILE", "value": names.CALLERS_PATH})
    return template


def build_callers(owner: Owner, gateways: str, issuer: Issuer) -> Object:
    """Return the ConfigMap with the accounts that may use the service's engines, and the keys of their tokens.

    gateways: `NAMESPACE/NAME` of their ServiceAccount. The other account is the service's own, for people who may
    create tokens in its namespace.
    """
    own = f"{owner.namespace}/{names.engine_name(owner.name)}"
    content = {
        "issuer": issuer.name,
        "audience": names.engine_audience(owner.namespace),
        "accounts": _name_accounts((gateways, own)),
        "keys": list(issuer.keys),
    }
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": build_metadata(owner, names.callers_name(owner.name)),
        "data": {names.CALLERS_KEY: json.dumps(content, indent=1, sort_keys=True)},
    }


def _name_accounts(accounts: Sequence[str]) -> list[str]:
    return [f"system:serviceaccount:{each.replace('/', ':')}" for each in accounts]
