"""Tests an engine with `callers_file`: which tokens it accepts, what stays open, and that new keys need no restart."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.engine.chat_model import write_chat_model
from tests.engine.processes import IDLE, EngineServer, wait_until
from tests.gateway.tokens import ISSUER, Signer

from conveyor_engine.errors import ConfigError
from conveyor_engine.serving.http.callers import OPEN_PATHS, Callers
from conveyor_protocol.engine_pages import PLACE_PATH
from conveyor_protocol.request_headers import ENGINE_CHALLENGE, PLACE_HEADER, PLACE_IF_FREE

AUDIENCE = "conveyor/team-a"
GATEWAY, OWN = "system:serviceaccount:conveyor-system:conveyor-gateway", "system:serviceaccount:team-a:chat-engine"
BODY = {"prompt": "hello", "max_tokens": 1}
SIGNER, FORGER = Signer(), Signer()  # both keys have the same id
NEW = Signer("new", "ES256")


def write_callers(file: Path, *signers: Signer) -> None:
    keys = [signer.publish() for signer in signers]
    content = {"issuer": ISSUER, "audience": AUDIENCE, "accounts": [GATEWAY, OWN], "keys": keys}
    file.write_text(json.dumps(content))


def sign(signer: Signer = SIGNER, header: dict[str, Any] | None = None, **changes: Any) -> str:
    now = int(time.time())
    times = {"iat": now - 60, "nbf": now - 60, "exp": now + 600}
    return signer.sign(header, **{"aud": [AUDIENCE], "sub": GATEWAY, **times, **changes})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("callers")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[EngineServer]:
    write_callers(folder / "callers.json", SIGNER)
    model = write_chat_model(folder / "tiny")
    with EngineServer(folder / "engine", model, IDLE, callers_file=folder / "callers.json") as engine:
        yield engine.wait_ready()


def complete(engine: EngineServer, token: str = "", **headers: str) -> httpx.Response:
    proof = {"Authorization": f"Bearer {token}"} if token else {}
    return engine.post("/v1/completions", BODY, **proof, **headers)


@pytest.mark.parametrize("account", [GATEWAY, OWN])
def test_the_gateways_and_the_services_own_account_are_answered(engine: EngineServer, account: str) -> None:
    for _ in range(2):  # the second token is remembered
        assert complete(engine, sign(sub=account)).status_code == 200


REJECTED: dict[str, tuple[Callable[[], str], str]] = {
    "none": (lambda: "", "the request has no token"),
    "forged": (lambda: sign(FORGER), "Signature verification failed"),
    "unknown key": (lambda: sign(NEW), "unknown key"),
    "another audience": (lambda: sign(aud=["conveyor/team-b"]), "Audience doesn't match"),
    "the gateway's audience": (lambda: sign(aud=["conveyor"]), "Audience doesn't match"),
    "expired": (lambda: sign(exp=int(time.time()) - 60), "Signature has expired"),
    "not yet valid": (lambda: sign(nbf=int(time.time()) + 3600), "not yet valid"),
    "another ServiceAccount": (lambda: sign(sub="system:serviceaccount:team-a:web"), "another ServiceAccount"),
    "another namespace": (lambda: sign(sub="system:serviceaccount:team-b:conveyor-gateway"), "another ServiceAccount"),
    "no ServiceAccount": (lambda: sign(sub="system:admin"), "not of a ServiceAccount"),
    "another issuer": (lambda: sign(iss="https://example.com"), "another issuer"),
    "huge": (lambda: "eyJ" + "a" * 8000, "more than 4096 characters"),
    "no signature": (lambda: sign().rpartition(".")[0] + ".", "no token of a ServiceAccount"),
    "an API key": (lambda: "sk-conveyor-team-a-" + "0" * 64, "no token of a ServiceAccount"),
}


@pytest.mark.parametrize("kind", REJECTED)
def test_others_are_rejected(engine: EngineServer, kind: str) -> None:
    make, why = REJECTED[kind]
    token = make()  # now: a token that was made when the tests were collected would have expired
    answer = complete(engine, token)
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "caller_refused")
    assert answer.headers["WWW-Authenticate"] == ENGINE_CHALLENGE
    assert why in answer.json()["error"]["message"]
    assert not token or token not in engine.log


def test_a_token_proves_nothing_beside_another_one_or_in_another_header(engine: EngineServer) -> None:
    twice = [("Authorization", f"Bearer {sign()}"), ("Authorization", f"Bearer {sign(FORGER)}")]
    answer = engine.client.post(f"{engine.url}/v1/completions", json=BODY, headers=twice)
    assert (answer.status_code, "several tokens" in answer.text) == (401, True)
    assert complete(engine, **{"x-api-key": sign()}).status_code == 401
    assert engine.post(f"/v1/completions?access_token={sign()}", BODY).status_code == 401


def test_health_and_metrics_stay_open_and_nothing_else(engine: EngineServer) -> None:
    document = engine.client.get(f"{engine.url}/openapi.json", headers={"Authorization": f"Bearer {sign()}"}).json()
    paths = (
        {path for path in document["paths"] if "{" not in path} | OPEN_PATHS | {PLACE_PATH, "/load", "/openapi.json"}
    )
    for path in paths:
        status = engine.get(path).status_code
        assert status == (200 if path in OPEN_PATHS else 401), path
    assert engine.get("/metrics/").status_code == 401
    assert engine.metric("conveyor_engine_http_responses_total", route="/load", status="401") > 0


def test_a_gateway_without_a_token_gets_the_503_with_which_it_tries_again(engine: EngineServer) -> None:
    answer = complete(engine, **{PLACE_HEADER: PLACE_IF_FREE})
    assert (answer.status_code, answer.headers["WWW-Authenticate"]) == (503, ENGINE_CHALLENGE)
    assert "Retry-After" in answer.headers


def test_new_keys_are_used_without_a_restart_and_old_ones_end(engine: EngineServer, folder: Path) -> None:
    file = folder / "callers.json"
    write_callers(file, SIGNER, NEW)
    wait_until(lambda: complete(engine, sign(NEW)).status_code == 200, "the new key", engine)
    assert complete(engine, sign()).status_code == 200
    write_callers(file, NEW)
    wait_until(lambda: complete(engine, sign()).status_code == 401, "the end of the old key", engine)
    file.write_text("{}")
    wait_until(lambda: "event=callers_refused" in engine.log, "the log", engine)
    assert complete(engine, sign(NEW)).status_code == 200  # the last good file counts
    write_callers(file, SIGNER)
    wait_until(lambda: complete(engine, sign()).status_code == 200, "the first key", engine)


@pytest.mark.parametrize("content", [None, "", "[]", '{"issuer": "a"}', "[" * 5000])
def test_an_engine_does_not_start_without_its_callers(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "callers.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match="cannot read `callers_file`"):
        Callers(file)
