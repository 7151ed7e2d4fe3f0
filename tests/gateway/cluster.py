"""Writes InferenceServices and the EndpointSlices of their engines to a real API server."""

import socket
from typing import Any

import pytest

from conveyor_api import names
from conveyor_api.served_name import object_name
from conveyor_kube.gateways import ADMIN_PORT_NAME
from e2e.cluster.api import Api

Json = dict[str, Any]


def own_address() -> str:
    """An address of this machine that is not a loopback one: the API server refuses those in EndpointSlices.

    Traffic to it stays inside the machine. Asking the routing table for it sends nothing.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("198.51.100.1", 9))
            address: str = probe.getsockname()[0]
    except OSError:
        address = "127.0.0.1"
    if address.startswith(("127.", "169.254.")):
        pytest.skip("this machine has no address but loopback ones, which EndpointSlices refuse")
    return address


def make_service(name: str, namespace: str, **spec: Any) -> Json:
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"model": {"uri": "hf://org/model"}, **spec},
    }


def make_slice(name: str, namespace: str, service: str, port: int, *endpoints: Json, **changes: Any) -> Json:
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": name, "namespace": namespace, "labels": {names.INFERENCE_SERVICE_LABEL: service}},
        "addressType": "IPv4",
        "ports": [{"name": names.ENGINE_PORT_NAME, "port": port, "protocol": "TCP"}],
        "endpoints": list(endpoints),
        **changes,
    }


def make_endpoint(address: str, **conditions: bool) -> Json:
    return {"addresses": [address], "conditions": {"ready": True, **conditions}}


def publish_gateway(api: Api, system_namespace: str, name: str, port: int, **conditions: bool) -> None:
    """Publish a gateway's admin port in an EndpointSlice of the gateways' Service, as Kubernetes does."""
    body = make_slice(name, system_namespace, "", port, make_endpoint(own_address(), **{"serving": True, **conditions}))
    body["metadata"]["labels"] = {"kubernetes.io/service-name": names.GATEWAY_ADMIN_SERVICE}
    body["ports"][0]["name"] = ADMIN_PORT_NAME
    api.apply(f"/apis/discovery.k8s.io/v1/namespaces/{system_namespace}/endpointslices/{name}", body)


class Cluster:
    """A namespace of an API server."""

    def __init__(self, api: Api, namespace: str) -> None:
        self.api = api
        self.namespace = namespace
        self._services = f"/apis/{names.GROUP}/{names.VERSION}/namespaces/{namespace}/{names.PLURAL}"
        self._claims = f"/apis/{names.GROUP}/{names.VERSION}/namespaces/{namespace}/{names.SERVED_NAME_PLURAL}"
        self._slices = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"

    def apply_service(self, name: str, **spec: Any) -> None:
        self.api.apply(f"{self._services}/{name}", make_service(name, self.namespace, **spec))

    def complete_rollout(self, name: str) -> None:
        """Set the status that the operator writes when a rollout is complete, without conditions."""
        generation = self.api.get(f"{self._services}/{name}")["metadata"]["generation"]
        body = {**make_service(name, self.namespace), "status": {"observedGeneration": generation}}
        self.api.apply(f"{self._services}/{name}/status", body)

    def set_status(self, name: str, **status: Any) -> None:
        body = {**make_service(name, self.namespace), "status": status}
        self.api.apply(f"{self._services}/{name}/status", body)

    def delete_service(self, name: str) -> None:
        self.api.delete(f"{self._services}/{name}")

    def apply_engine(self, service: str, address: str, port: int, **conditions: bool) -> None:
        """Publish an engine in its own slice, because test engines share an address and differ in ports."""
        body = make_slice(f"{service}-{port}", self.namespace, service, port, make_endpoint(address, **conditions))
        self.api.apply(f"{self._slices}/{service}-{port}", body)

    def delete_engine(self, service: str, port: int) -> None:
        self.api.delete(f"{self._slices}/{service}-{port}")

    def release_name(self, name: str) -> None:
        self.api.delete(f"{self._claims}/{object_name(name)}")

    def clear(self) -> None:
        """Delete everything. Otherwise it would appear on the pages of each gateway for all namespaces."""
        self.api.delete(self._services)
        self.api.delete(self._slices)
        self.api.delete(self._claims)
