"""Calls the API server of a kubeconfig, with its user's rights.

This module makes all calls to the API server, except `kubectl port-forward` and load through the API server's proxy.

The module uses the synchronous client, because this program makes one call at a time. The client also runs the
credential plugins of a kubeconfig.
"""

import json
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import urllib3
import yaml
from kubernetes import config

from conveyor_insight.facts import Object, Unanswered
from conveyor_kube.wanted_json import cut_depth
from conveyor_operator.kinds import ObjectKind

_TIMEOUT_SECONDS: Final = 30
_NO_QUERY: Final[Mapping[str, str]] = {}
_WRITER: Final[Mapping[str, str]] = {"fieldManager": "kubectl-conveyor"}
# Errors that the client raises for a file that is not a kubeconfig.
_UNREADABLE: Final = (config.ConfigException, OSError, ValueError, TypeError, yaml.YAMLError)


class Refused(Unanswered):
    """The API server rejected the request. `status` is the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Cluster:
    """A cluster. `namespace`: the namespace in the context.

    The constructor raises Unanswered if the file is not a kubeconfig.
    """

    def __init__(self, kubeconfig: str | None, context: str | None) -> None:
        try:
            contexts, current = config.list_kube_config_contexts(kubeconfig)
            self._client = config.new_client_from_config(kubeconfig, context, persist_config=False)
        except _UNREADABLE as error:
            raise Unanswered(f"cannot load a kubeconfig: {' '.join(str(error).split())}") from error
        chosen = next((each for each in contexts if each["name"] == context), current)
        self.namespace = str(chosen["context"].get("namespace") or "default")

    def get(self, path: str, query: Mapping[str, str] = _NO_QUERY) -> Object:
        """Return the object at a path of the API. Raises Refused or Unanswered, as the other methods do."""
        return self._query("GET", path, query)

    def _query(
        self, method: str, path: str, query: Mapping[str, str] = _NO_QUERY, body: Object | None = None
    ) -> Object:
        request = self._client.param_serialize(
            method,
            path,
            query_params=list(query.items()),
            header_params={"Accept": "application/json", "Content-Type": "application/json"},
            body=body,
            auth_settings=["BearerToken"],
        )
        try:
            answer = self._client.call_api(*request, _request_timeout=_TIMEOUT_SECONDS)
            content, status = answer.read(), int(answer.status)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise Unanswered(f"the API server does not answer: {error}") from error
        if status >= 300:
            raise Refused(status, _find_message(content) or f"HTTP status {status}")
        return _parse(content)

    def create(self, path: str, body: Object) -> Object:
        """Create the object and return it as the API server has stored it."""
        return self._query("POST", path, body=body)

    def replace(self, path: str, body: Object) -> Object:
        """Replace the object if it still has the version of `body`; otherwise raise Refused with status 409."""
        return self._query("PUT", path, _WRITER, body)

    def delete(self, path: str) -> None:
        """Delete the object. Do nothing if it does not exist."""
        with suppress_not_found():
            self._query("DELETE", path)

    def find_proxied_name(self, namespace: str, service: str) -> str:
        """Return the name by which the API server's proxy and its rights know a Service: with its port and scheme."""
        path = f"/api/v1/namespaces/{namespace}/services/{service}"
        try:
            port = self.get(path)["spec"]["ports"][0]
        except Refused as error:
            raise Refused(error.status, f"cannot read the Service {service} in {namespace}: {error}") from error
        return f"{'https:' if port.get('name') == 'https' else ''}{service}:{port['port']}"

    def find_service_url(self, namespace: str, proxied_name: str) -> str:
        """Return the URL of the API server's proxy to a Service, for clients that use `build_tls` and `build_headers`.

        The proxy forwards server-sent events as they arrive. The caller needs no route to the pods.
        """
        path = f"/api/v1/namespaces/{namespace}/services/{proxied_name}/proxy"
        return str(self._client.configuration.host).rstrip("/") + path

    def build_tls(self) -> ssl.SSLContext:
        """Return a TLS context with the API server's CA and the user's certificate."""
        configuration = self._client.configuration
        data = configuration.ca_cert_data
        context = ssl.create_default_context(
            cafile=configuration.ssl_ca_cert, cadata=data.decode() if isinstance(data, bytes) else data
        )
        if configuration.cert_file:
            context.load_cert_chain(configuration.cert_file, configuration.key_file)
        if not configuration.verify_ssl:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context

    def build_headers(self) -> dict[str, str]:
        """Return the header with the user's token, renewed if it is about to expire; empty for certificate users."""
        token = self._client.configuration.auth_settings().get("BearerToken")
        return {} if token is None else {"Authorization": str(token["value"])}

    @property
    def proxy(self) -> str | None:
        """The HTTP proxy through which the API server is reached; None: no proxy."""
        proxy: str | None = self._client.configuration.proxy
        return proxy

    def may(self, verb: str, kind: ObjectKind, namespace: str, name: str = "", subresource: str = "") -> bool:
        """Ask the API server whether the user has this permission. The request creates no object."""
        attributes = {"verb": verb, "group": kind.group, "resource": kind.plural}
        attributes |= {"name": name, "subresource": subresource}
        attributes |= {"namespace": namespace} if kind.namespaced else {}
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }
        answer = self._query("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body=review)
        return bool(answer["status"]["allowed"])

    def find(self, path: str) -> Object | None:
        """Like `get`, but return None if the object does not exist."""
        with suppress_not_found():
            return self.get(path)
        return None


@contextmanager
def suppress_not_found() -> Iterator[None]:
    """Suppress `Refused` errors with status 404."""
    try:
        yield
    except Refused as error:
        if error.status != 404:
            raise


def _parse(content: bytes) -> Object:
    try:
        parsed: Object = _load(content)
    except ValueError as error:
        raise Unanswered(f"the API server's response is not JSON: {content[:100]!r}") from error
    return parsed


def _load(content: bytes) -> Any:
    """Decode JSON of any depth: anyone may write managedFields that are too deep for the JSON library."""
    try:
        return json.loads(content)
    except RecursionError:
        return json.loads(cut_depth(content))


def _find_message(content: bytes) -> str:
    """Return the message of a Status object, or the beginning of other content."""
    try:
        return str(_load(content)["message"])
    except (ValueError, LookupError, TypeError):
        return content.decode(errors="replace")[:200].strip()
