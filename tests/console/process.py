"""Runs a console as users do: `python -m conveyor_console` in its own process, on a free port."""

import os
import re
import subprocess
import sys
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from e2e.cluster.api import Api, wait_until

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Page:
    """An HTTP response. `headers`: by lower-case name."""

    status: int
    text: str
    headers: dict[str, str]


class _KeepRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}), _KeepRedirects)


class ConsoleProcess:
    """A console process. `with` starts it and returns when it is ready."""

    def __init__(self, kubeconfig: Path, system_namespace: str, *flags: str) -> None:
        self._command = [
            *(sys.executable, "-m", "conveyor_console", "--kubeconfig", str(kubeconfig), "--host", "127.0.0.1"),
            *("--port", "0", "--system-namespace", system_namespace, "--read-seconds", "0.2", *flags),
        ]
        self._log_file = tempfile.NamedTemporaryFile("w+", prefix="console-", suffix=".log")  # noqa: SIM115
        self.port = 0

    def __enter__(self) -> Self:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KUBERNETES_")}
        self.process = subprocess.Popen(
            self._command, cwd=REPOSITORY, env=environment, stdout=subprocess.DEVNULL, stderr=self._log_file
        )
        try:
            wait_until("the console", self._is_ready, self._check, 120)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait(30)
        self._log_file.close()

    @property
    def log(self) -> str:
        return Path(self._log_file.name).read_text()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _check(self) -> None:
        assert self.process.poll() is None, self.log

    def _is_ready(self) -> bool:
        found = re.search(r"serving port=(\d+)", self.log)
        if not found:
            return False
        self.port = int(found[1])
        return self.get("/readyz").status == 200

    def get(self, path: str, token: str = "", **headers: str) -> Page:
        """Read a page, with a token in the header Authorization unless it is empty. Follows no redirects."""
        bearer = {"Authorization": f"Bearer {token}"} if token else {}
        return self.send(urllib.request.Request(self.url + path, headers={**bearer, **headers}))

    def post(self, path: str, headers: dict[str, str], **fields: str) -> Page:
        data = urllib.parse.urlencode(fields).encode()
        return self.send(urllib.request.Request(self.url + path, data, headers))

    def send(self, request: urllib.request.Request) -> Page:
        try:
            with _OPENER.open(request, timeout=60) as response:
                return _read(response.status, response)
        except urllib.error.HTTPError as error:
            with error:
                return _read(error.code, error)

    def wait_for(self, text: str, token: str, path: str = "/") -> str:
        """Return the page when it contains the text."""
        wait_until(f"{text!r} on the page", lambda: text in self.get(path, token).text, self._check, 60)
        return self.get(path, token).text


def _read(status: int, response: Any) -> Page:
    headers = {name.lower(): value for name, value in response.headers.items()}
    return Page(status, response.read().decode(), headers)


def make_reader(
    api: Api, namespace: str, name: str = "reader", resources: tuple[str, ...] = ("inferenceservices",)
) -> str:
    """Return the token of a new ServiceAccount that may list these kinds in its namespace."""
    accounts = f"/api/v1/namespaces/{namespace}/serviceaccounts"
    rbac = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}"
    rule = {"apiGroups": ["conveyor.dev"], "resources": list(resources), "verbs": ["list"]}
    api.create(accounts, {"metadata": {"name": name}})
    api.create(f"{rbac}/roles", {"metadata": {"name": name}, "rules": [rule]})
    subject = {"kind": "ServiceAccount", "name": name, "namespace": namespace}
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
    api.create(f"{rbac}/rolebindings", {"metadata": {"name": name}, "roleRef": reference, "subjects": [subject]})
    wait_until_allowed(api, namespace, name, namespace)
    return request_token(api, namespace, name)


def wait_until_allowed(api: Api, namespace: str, name: str, where: str) -> None:
    """Wait until the API server knows that an account may list InferenceServices in `where`; "": everywhere.

    It knows new bindings after a moment, and the console keeps what it answers.
    """
    resource = {"verb": "list", "group": "conveyor.dev", "resource": "inferenceservices", "namespace": where}
    spec = {"user": f"system:serviceaccount:{namespace}:{name}", "resourceAttributes": resource}
    path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
    wait_until("the binding", lambda: api.create(path, {"spec": spec})["status"]["allowed"])


def request_token(api: Api, namespace: str, name: str) -> str:
    """Return a token as `kubectl create token` does."""
    path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token"
    token: str = api.create(path, {"spec": {}})["status"]["token"]
    return token
