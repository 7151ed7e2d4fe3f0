"""Builds the two Services and the ServiceAccount of an InferenceService. Pure."""

from conveyor_api import names
from conveyor_operator.loop.owner import Object, Owner, build_metadata


def build_engine_service(owner: Owner, *, has_tls: bool) -> Object:
    """Return the headless Service of the engines. The gateway reads its EndpointSlices and chooses an engine itself.

    Only pods with a port of this name get an endpoint with a port, so pods with and without TLS are never mixed.
    """
    port = {
        "name": names.ENGINE_PORT_NAME,
        "port": names.ENGINE_PORT,
        "targetPort": names.ENGINE_TLS_PORT_NAME if has_tls else names.ENGINE_PORT_NAME,
        "protocol": "TCP",
        "appProtocol": "https" if has_tls else "http",
    }
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": build_metadata(owner, names.engine_name(owner.name)),
        "spec": {
            "type": "ClusterIP",
            "clusterIP": "None",
            "publishNotReadyAddresses": False,
            "selector": names.pod_selector(owner.name),
            "ports": [port],
        },
    }


def build_public_service(owner: Owner, gateway_host: str, *, has_tls: bool) -> Object:
    """Return the Service for clients: an alias of the gateway, which routes by the Host `<name>.<namespace>`."""
    number = names.GATEWAY_TLS_SERVICE_PORT if has_tls else names.GATEWAY_SERVICE_PORT
    port = {"name": "https" if has_tls else "http", "port": number, "protocol": "TCP"}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": build_metadata(owner, names.public_service_name(owner.name)),
        "spec": {"type": "ExternalName", "externalName": gateway_host, "ports": [port]},
    }


def build_service_account(owner: Owner) -> Object:
    """Return the engines' ServiceAccount, without a token, because engines do not call Kubernetes."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": build_metadata(owner, names.engine_name(owner.name)),
        "automountServiceAccountToken": False,
    }
