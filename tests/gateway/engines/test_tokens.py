"""Tests the gateway's tokens for engines: who gets which, when they are renewed, and how often they are requested."""

import asyncio

import pytest
from aiohttp import ClientSession, web
from tests.gateway.cluster import own_address
from tests.gateway.engine_servers import Engine, running_engine

from conveyor_gateway.engines.tokens import EngineTokens, find_namespace
from conveyor_kube.tokens import IssuedToken, TokenNotIssued
from conveyor_protocol.request_headers import CHALLENGE_HEADER, ENGINE_CHALLENGE

CHALLENGE = {CHALLENGE_HEADER: ENGINE_CHALLENGE}


class Issuing:
    """Issues numbered tokens that live for 100 s, by a clock of its own. accepted: those that engines accept."""

    def __init__(self) -> None:
        self.now_unix = 1000.0
        self.audiences: list[str] = []
        self.fails = False
        self.accepted: set[str] = set()

    async def __call__(self, audience: str) -> IssuedToken:
        self.audiences.append(audience)
        await asyncio.sleep(0.01)
        if self.fails:
            raise TokenNotIssued("no")
        token = f"{audience}-{len(self.audiences)}"
        self.accepted.add(token)
        return IssuedToken(token, self.now_unix + 50, self.now_unix + 100)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        return web.Response(text="ok") if token in self.accepted else web.Response(status=503, headers=CHALLENGE)


@pytest.fixture
def issuing() -> Issuing:
    return Issuing()


@pytest.fixture
def tokens(issuing: Issuing) -> EngineTokens:
    tokens = EngineTokens(lambda: issuing.now_unix)
    tokens.begin(issuing)
    return tokens


async def send(tokens: EngineTokens, engine: Engine, namespace: str = "a", data: object = b"{}") -> int:
    url, host = f"http://{own_address()}:{engine.port}/v1/completions", f"qwen-engine.{namespace}.svc:8000"
    async with (
        ClientSession(middlewares=(tokens,)) as http,
        http.post(url, data=data, headers={"Host": host}) as answer,
    ):
        return answer.status


async def test_an_engine_gets_a_token_of_its_namespace_once_it_has_asked(
    issuing: Issuing, tokens: EngineTokens
) -> None:
    async with running_engine(issuing.handle) as engine:
        assert {await send(tokens, engine) for _ in range(3)} == {200}
        assert issuing.audiences == ["conveyor/a"]
        assert len(engine.requests) == 4  # the first one was sent twice
        assert await send(tokens, engine, "b") == 200
        sent = [request.headers.get("Authorization", "") for request, _ in engine.requests[-2:]]
    assert issuing.audiences == ["conveyor/a", "conveyor/b"]
    assert sent == ["", "Bearer conveyor/b-2"]


async def test_engines_that_ask_for_none_get_none(issuing: Issuing, tokens: EngineTokens) -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        return web.Response(status=401, headers={CHALLENGE_HEADER: "Bearer"})  # such as vLLM with --api-key

    async with running_engine(handle) as engine:
        assert await send(tokens, engine) == 401
        assert "Authorization" not in engine.requests[0][0].headers
    assert issuing.audiences == []


async def test_requests_at_once_share_one_token(issuing: Issuing, tokens: EngineTokens) -> None:
    async with running_engine(issuing.handle) as engine:
        assert await asyncio.gather(*(send(tokens, engine) for _ in range(10))) == [200] * 10
    assert len(issuing.audiences) == 1


async def test_a_token_is_renewed_in_the_second_half_of_its_life(issuing: Issuing, tokens: EngineTokens) -> None:
    async with running_engine(issuing.handle) as engine:
        await send(tokens, engine)
        issuing.now_unix += 61
        assert await send(tokens, engine) == 200  # with the first one
        await asyncio.sleep(0.05)
        assert len(issuing.audiences) == 2
        issuing.now_unix += 30
        issuing.accepted = {"conveyor/a-2"}
        assert await send(tokens, engine) == 200
        issuing.now_unix += 200  # all have expired, as after a long silence
        assert await send(tokens, engine) == 200
    assert len(issuing.audiences) == 3


async def test_a_rejected_token_is_replaced_at_most_once_a_minute(issuing: Issuing, tokens: EngineTokens) -> None:
    async with running_engine(issuing.handle) as engine:
        await send(tokens, engine)
        issuing.accepted.clear()  # the cluster's keys have changed
        assert {await send(tokens, engine) for _ in range(5)} == {503}
        assert len(issuing.audiences) == 1
        issuing.now_unix += 61
        assert {await send(tokens, engine) for _ in range(5)} == {200}
    assert len(issuing.audiences) == 2


async def test_the_former_token_is_used_while_engines_reject_the_new_one(
    issuing: Issuing, tokens: EngineTokens
) -> None:
    """As while the API server signs with a key that engines do not have yet."""
    async with running_engine(issuing.handle) as engine:
        await send(tokens, engine)
        issuing.now_unix += 61
        await send(tokens, engine)  # begins to renew it
        await asyncio.sleep(0.05)
        issuing.accepted = {"conveyor/a-1"}
        before = len(engine.requests)
        assert await asyncio.gather(*(send(tokens, engine) for _ in range(5))) == [200] * 5
        assert [await send(tokens, engine) for _ in range(5)] == [200] * 5
        assert len(engine.requests) - before <= 15, "only requests that had the new token are sent twice"
        issuing.accepted = {"conveyor/a-2"}
        assert [await send(tokens, engine) for _ in range(5)] == [200] * 5
    assert issuing.audiences == ["conveyor/a"] * 2


async def test_without_a_token_the_engine_s_answer_counts_and_the_next_attempt_is_later(
    issuing: Issuing, tokens: EngineTokens
) -> None:
    issuing.fails = True
    async with running_engine(issuing.handle) as engine:
        assert {await send(tokens, engine) for _ in range(5)} == {503}
        assert len(issuing.audiences) == 1
        issuing.fails, issuing.now_unix = False, issuing.now_unix + 6
        assert await send(tokens, engine) == 200


async def test_a_body_that_is_sent_in_pieces_is_left_to_the_caller(issuing: Issuing, tokens: EngineTokens) -> None:
    async def pieces() -> object:
        yield b"{}"

    async with running_engine(issuing.handle) as engine:
        assert await send(tokens, engine, data=pieces()) == 503
        assert await send(tokens, engine, data=pieces()) == 200


@pytest.mark.parametrize(
    ("host", "namespace"),
    [("qwen-engine.team-a.svc:8000", "team-a"), ("10.0.0.1:8000", ""), ("", ""), ("a.b.c.d:1", ""), ("[::1]:1", "")],
)
def test_the_namespace_is_that_of_the_host(host: str, namespace: str) -> None:
    assert find_namespace(host) == namespace
