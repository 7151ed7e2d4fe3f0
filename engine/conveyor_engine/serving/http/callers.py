"""Lets only the ServiceAccounts of the file `callers_file` use the engine, by their tokens.

Probes and metrics stay open. The operator writes the file, and the kubelet updates it when the cluster's keys change,
so the engine calls nobody (docs/adr/0195). Used by `app`.
"""

from pathlib import Path
from typing import Any, Final

import msgspec
from starlette.responses import Response
from starlette.types import Scope

from conveyor_engine.errors import ConfigError, ErrorCode, InvalidRequest, RequestError, Unavailable
from conveyor_engine.serving.http.failures import failure_response
from conveyor_process.followed_files import FollowedFiles
from conveyor_protocol.open_inference import LIVE_PATH, READY_PATH
from conveyor_protocol.request_headers import CHALLENGE_HEADER, ENGINE_CHALLENGE, PLACE_HEADER
from conveyor_tokens.verifier import TokenRejected, TokenVerifier, is_token

_HEALTH_PATHS: Final = ("/livez", "/readyz", "/health", "/ping", "/v1/health", "/v1/ping", LIVE_PATH, READY_PATH)
OPEN_PATHS: Final = frozenset((*_HEALTH_PATHS, "/metrics"))
_AUTHORIZATION, _PLACE = b"authorization", PLACE_HEADER.lower().encode()
_BEARER: Final = "bearer "


class _File(msgspec.Struct, frozen=True):
    """The content of the file, JSON. accounts: `system:serviceaccount:NAMESPACE:NAME`. keys: JSON Web Keys."""

    issuer: str
    audience: str
    accounts: frozenset[str]
    keys: list[dict[str, Any]]


class Callers:
    """The accounts that may use the engine, and the keys that verify their tokens."""

    def __init__(self, path: Path) -> None:
        """Load the file. Raises ConfigError."""
        self._path = path
        try:
            files = FollowedFiles("callers", (path,), self._load)
        except OSError as error:
            raise ConfigError(f"cannot read `callers_file`: {error}") from error
        self.follow: Final = files.follow

    def _load(self) -> None:
        """Raises OSError. A file with errors changes nothing."""
        try:
            file = msgspec.json.decode(self._path.read_bytes(), type=_File)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise OSError(f"{self._path}: {error}") from error
        verifier = TokenVerifier(file.audience, lambda account, _: account)
        verifier.set_keys(file.issuer, file.keys)
        self._audience, self._accounts, self._verifier = file.audience, file.accounts, verifier

    def refuse(self, scope: Scope) -> Response | None:
        """Return the response to a request that may not use the engine; None for one that may."""
        problem = "" if scope["path"] in OPEN_PATHS else self._find_problem(scope)
        if not problem:
            return None
        message = f"this engine answers only its gateways: {problem}; send a token for the audience {self._audience}"
        error: RequestError = InvalidRequest(message, code=ErrorCode.CALLER_REFUSED)
        if any(name == _PLACE for name, _ in scope["headers"]):
            error = Unavailable(message)  # a gateway, which tries again when it has a token
        response = failure_response(error, scope["path"])
        response.headers[CHALLENGE_HEADER] = ENGINE_CHALLENGE
        return response

    def _find_problem(self, scope: Scope) -> str:
        """Return why the request proves no account that may use the engine; "" if it proves one."""
        sent = [value for name, value in scope["headers"] if name == _AUTHORIZATION]
        if len(sent) != 1:
            return "the request has several tokens" if sent else "the request has no token"
        text = sent[0].decode("latin-1")
        token = text[len(_BEARER) :].strip() if text[: len(_BEARER)].lower() == _BEARER else ""
        if not is_token(token):
            return "the request has no token of a ServiceAccount"
        try:
            account = self._verifier.verify(token)
        except TokenRejected as error:
            return f"the token is not valid: {error}"
        return "" if account in self._accounts else "the token is of another ServiceAccount"
