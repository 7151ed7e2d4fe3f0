"""The cluster of a kubeconfig, read with its user's rights. The only calls of this program.

With the client that waits for each answer: nothing here is asked at once, and it runs kubeconfigs' login helpers.
"""

import json
from collections.abc import Mapping
from typing import Final

import urllib3
import yaml
from kubernetes import config

from conveyor_insight.facts import Object, Unanswered
from conveyor_operator.kinds import Kind

_TIMEOUT_SECONDS: Final = 30
_NO_QUERY: Final[Mapping[str, str]] = {}
# What the client raises for a file that is no kubeconfig.
_UNREADABLE: Final = (config.ConfigException, OSError, ValueError, TypeError, yaml.YAMLError)


class Refused(Unanswered):
    """The API server says no; `status` is the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Cluster:
    """`namespace` is that of the context. Raises Unanswered for what is no kubeconfig."""

    def __init__(self, kubeconfig: str | None, context: str | None) -> None:
        try:
            contexts, current = config.list_kube_config_contexts(kubeconfig)
            self._client = config.new_client_from_config(kubeconfig, context, persist_config=False)
        except _UNREADABLE as error:
            raise Unanswered(f"no cluster to ask: {' '.join(str(error).split())}") from error
        chosen = next((each for each in contexts if each["name"] == context), current)
        self.namespace = str(chosen["context"].get("namespace") or "default")

    def get(self, path: str, query: Mapping[str, str] = _NO_QUERY) -> Object:
        """The object at a path of the API. Raises Refused or Unanswered."""
        return self._ask("GET", path, query)

    def _ask(self, method: str, path: str, query: Mapping[str, str] = _NO_QUERY, body: Object | None = None) -> Object:
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

    def may(self, verb: str, kind: Kind, namespace: str) -> bool:
        """Whether the user may do so, as the API server says. Such a question leaves nothing behind."""
        attributes = {"verb": verb, "group": kind.group, "resource": kind.plural}
        attributes |= {"namespace": namespace} if kind.namespaced else {}
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }
        answer = self._ask("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body=review)
        return bool(answer["status"]["allowed"])

    def find(self, path: str) -> Object | None:
        """As `get`; None where there is none."""
        try:
            return self.get(path)
        except Refused as error:
            if error.status == 404:
                return None
            raise


def _parse(content: bytes) -> Object:
    try:
        parsed: Object = json.loads(content)
    except ValueError as error:
        raise Unanswered(f"the API server's answer is no JSON: {content[:100]!r}") from error
    return parsed


def _find_message(content: bytes) -> str:
    """Of a Status object; empty for other words."""
    try:
        return str(json.loads(content)["message"])
    except (ValueError, LookupError, TypeError):
        return content.decode(errors="replace")[:200].strip()
