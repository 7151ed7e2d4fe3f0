"""Grammars that would end or stop an engine: only their own requests end, and others are served meanwhile."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.engine.processes import EngineServer

TOKENS = 200


def build_chain(num_rules: int) -> str:
    return "start: r0\n" + "\n".join(f'r{n}: "x" r{n + 1}' for n in range(num_rules)) + f'\nr{num_rules}: "y"'


def build_and(num_terms: int) -> str:
    return "start: A\nA: " + " & ".join(f"/(?s:.*)[a-z]{{{n}}}(?s:.*)/" for n in range(1, num_terms + 1))


def build_ambiguous(branches: int, *, vary: bool) -> dict[str, Any]:
    items: list[dict[str, Any]] = [{"type": "array", "items": {"$ref": "#/$defs/n"}} for _ in range(branches)]
    for number, branch in enumerate(items if vary else ()):
        branch["maxItems"] = 1000 + number
    return {"$defs": {"n": {"anyOf": [*items, {"type": "string"}]}}, "$ref": "#/$defs/n"}


ATTACKS: dict[str, dict[str, Any]] = {
    "a chain of rules": {"structured_outputs": {"grammar": build_chain(2_675)}},
    "29 intersections": {"structured_outputs": {"grammar": build_and(29)}},
    "as many intersections as allowed": {"structured_outputs": {"grammar": build_and(17)}},
    "180 equal branches": {"structured_outputs": {"json": build_ambiguous(180, vary=False)}, "n": 4},
    "180 branches": {"structured_outputs": {"json": build_ambiguous(180, vary=True)}, "n": 4},
    "references": {"guided_json": {"$ref": "#/$defs/0", "$defs": {
        str(n): {"items": {"$ref": f"#/$defs/{n + 1}"}} for n in range(2_000)}}},
}  # fmt: skip


@pytest.fixture(scope="module")
def server(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    with EngineServer(tmp_path_factory.mktemp("hostile"), chat_model, max_num_seqs=8) as started:
        yield started.wait_ready()


def attack(server: EngineServer, fields: dict[str, Any]) -> httpx.Response:
    bias = {str(token): 100 for token in range(3, 380) if token % 7 == 0}
    body = {"prompt": "a", "max_tokens": 40, "temperature": 0, "logit_bias": bias, **fields}
    return server.post("/v1/completions", body)


FURTHER = ("29 intersections", "180 equal branches")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in FURTHER else name for name in ATTACKS]
)
def test_a_hostile_grammar_ends_its_own_request_alone(server: EngineServer, name: str) -> None:
    free = {"prompt": "the fox", "max_tokens": TOKENS, "ignore_eos": True, "seed": 1, "temperature": 0}
    formed = {"prompt": "a", "structured_outputs": {"choice": ["yes", "no"]}, "max_tokens": 20}
    alone = server.post("/v1/completions", free).json()["choices"]
    with ThreadPoolExecutor() as pool:
        hostile = [pool.submit(attack, server, ATTACKS[name]) for _ in range(2)]
        others = [
            pool.submit(server.post, "/v1/completions", free),
            pool.submit(server.post, "/v1/completions", formed),
        ]
        texts = [other.result().json()["choices"] for other in others]
        answers = [each.result() for each in hostile]
    assert texts[0] == alone
    assert texts[1][0]["text"] in ("yes", "no")
    for answer in answers:
        assert answer.status_code in (200, 400), answer.text
        if answer.status_code == 400:
            assert answer.json()["error"]["code"] in ("invalid_value", "form_too_costly", "prompt_too_costly")
    assert server.process.poll() is None
    assert "engine_failed" not in server.log
    assert server.post("/v1/completions", free).json()["choices"] == alone


def test_abandoned_grammars_leave_nothing_behind(server: EngineServer) -> None:
    costly = {"prompt": "a", "structured_outputs": {"grammar": build_and(16)}, "max_tokens": 4}
    for number in range(4):
        body = json.dumps({**costly, "structured_outputs": {"grammar": build_and(16) + f"\n// {number}"}})
        with pytest.raises(httpx.TimeoutException):
            httpx.post(f"{server.url}/v1/completions", content=body, timeout=httpx.Timeout(5, read=0.005))
    choice = {"prompt": "a", "structured_outputs": {"choice": ["a", "b"]}, "n": 8, "max_tokens": 5}
    assert len(server.post("/v1/completions", choice).json()["choices"]) == 8
