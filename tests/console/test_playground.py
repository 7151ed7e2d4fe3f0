"""Tests the page for trying a service, with a real API server, gateway and engine."""

import asyncio
import json
import re
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from aiohttp import web
from tests.console.process import ConsoleProcess, make_reader
from tests.console.trying import (
    read_changes,
    read_curl,
    read_fields,
    read_problem,
    read_receipt,
    read_text,
    send,
    trying,
)
from tests.contract.serving import serving
from tests.engine.processes import EngineServer
from tests.gateway.cluster import Cluster
from tests.gateway.keys import make_api_key, make_key
from tests.gateway.process import GatewayProcess

from conveyor_api import names
from conveyor_console.playground.fields import MAX_FORM_BYTES
from conveyor_console.playground.playground import MAX_REQUESTS_EACH
from e2e.cluster.api import Api, wait_until

HOSTILE = "<script>alert(1)</script>\r\n\u2028\"'><img src=x onerror=alert(1)>"
GREEDY, SAMPLED = "_", "`"  # the tokens of the idle engine
CHAT = [("api", "chat"), ("message", "Hello <b>you</b>"), ("max_tokens", "40"), ("temperature", "0"), ("key", "")]
LONG = [("api", "completions"), ("message", "Hello"), ("max_tokens", "8000")]


@pytest.fixture
async def service(
    playground: ConsoleProcess, engine: EngineServer, gateway: GatewayProcess, crd: Api, namespace: str, token: str
) -> AsyncIterator[str]:
    """A service with an engine that generates text."""
    async with serving(engine, [gateway], crd, namespace) as key:
        await asyncio.to_thread(report, Cluster(crd, namespace), f"{gateway.url}/{key}/v1")
        await asyncio.to_thread(playground.wait_for, "Most tokens", token, f"/services/{key}/try")
        yield key


def report(cluster: Cluster, url: str, **status: Any) -> None:
    """Write the status that the operator writes."""
    model = {"name": "tiny", "task": "Generate"}
    cluster.set_status("tiny", observedGeneration=1, readyReplicas=1, model=model, url=url, **status)


def wait_for(what: str, ready: Callable[[], bool]) -> None:
    wait_until(what, ready, lambda: None, 60)


def test_a_chat_is_answered_with_its_receipt(playground: ConsoleProcess, service: str, token: str) -> None:
    link = f'href="/services/{service}/try"'
    assert link in playground.get(f"/services/{service}", token).text
    changes = send(playground, token, service, CHAT)
    assert (read_text(changes), read_problem(changes)) == (GREEDY * 40, "")
    assert "Hello &lt;b&gt;you&lt;/b&gt;" in changes
    assert "The answer has reached its limit of tokens." in changes
    sentence = read_receipt(changes)
    assert re.match(rf"{service} answered [0-9a-f]{{32}} with 200 in .*generating 40 tokens.*It cost", sentence)
    assert "&#34;gateway_queue_ms&#34;:" in changes


def test_the_next_message_of_a_chat_has_the_earlier_ones(playground: ConsoleProcess, service: str, token: str) -> None:
    turns = re.findall(r'name="turn" form="try" value="([^"]*)"', send(playground, token, service, CHAT))
    assert turns == ["Hello &lt;b&gt;you&lt;/b&gt;", GREEDY * 40]
    said = [("turn", "Hello\r\nthere"), ("turn", GREEDY * 40)]
    changes = send(playground, token, service, [*CHAT, *said])
    messages = json.loads(re.findall(r"-d '(.*)'", read_curl(changes))[0])["messages"]
    assert [(each["role"], each["content"]) for each in messages] == [
        ("user", "Hello\nthere"),
        ("assistant", GREEDY * 40),
        ("user", "Hello <b>you</b>"),
    ]
    assert read_text(changes) == GREEDY * 40


async def test_the_command_sends_the_same_request(playground: ConsoleProcess, service: str, token: str) -> None:
    changes = await asyncio.to_thread(send, playground, token, service, CHAT)
    run = await asyncio.create_subprocess_exec("bash", "-c", read_curl(changes), stdout=subprocess.PIPE)
    printed, _ = await run.communicate()
    events = [json.loads(line.removeprefix("data: ")) for line in printed.decode().splitlines() if "{" in line]
    text = "".join(each["choices"][0]["delta"].get("content", "") for each in events if each["choices"])
    assert text == GREEDY * 40
    assert events[-1]["usage"]["receipt"]["decode_ms"] > 0


def test_the_fields_have_examples_that_work(playground: ConsoleProcess, service: str, token: str) -> None:
    fields = read_fields(playground.get(f"/services/{service}/try", token).text)
    assert len(read_text(send(playground, token, service, list(fields.items())))) == 256


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"message": "  "}, "Fill in “Message”."),
        ({"max_tokens": "many"}, "“Most tokens” must be a number."),
        ({"max_tokens": "0"}, "Status 400: invalid_value: "),
        ({"system": "Be brief."}, "Status 400: "),
        ({"key": "two words"}, "The API key has characters that no key has."),
    ],
)
def test_what_is_wrong_is_said(
    playground: ConsoleProcess, service: str, token: str, changed: dict[str, str], problem: str
) -> None:
    values = list({**dict(CHAT), **changed}.items())
    assert read_problem(send(playground, token, service, values)).startswith(problem)


def test_a_key_is_used_once_and_kept_nowhere(
    playground: ConsoleProcess, gateway: GatewayProcess, service: str, crd: Api, namespace: str, token: str
) -> None:
    cluster, key = Cluster(crd, namespace), make_key(namespace)
    cluster.apply_service("tiny", batching={"maxBatchSize": 4}, access={"mode": "Required"})
    crd.create(
        f"/apis/{names.GROUP}/{names.VERSION}/namespaces/{namespace}/{names.API_KEY_PLURAL}", make_api_key(namespace)
    )
    wait_for("the key", lambda: "missing_api_key" in read_problem(send(playground, token, service, CHAT)))
    with_key = [*CHAT[:-1], ("key", key)]
    wait_for("the answer", lambda: not read_problem(send(playground, token, service, with_key)))
    changes = send(playground, token, service, with_key)
    assert '-H "Authorization: Bearer $KEY"' in read_curl(changes)
    for text in (changes, playground.log, "\n".join(gateway.log)):
        assert key not in text
    assert "missing_api_key" in read_problem(send(playground, token, service, CHAT))


def test_only_who_sees_the_service_may_try_it(playground: ConsoleProcess, service: str, crd: Api, token: str) -> None:
    other = f"other-{uuid4().hex[:8]}"
    crd.create("/api/v1/namespaces", {"metadata": {"name": other}})
    stranger = make_reader(crd, other)
    assert playground.get(f"/services/{service}/try", stranger).status == 404
    for headers, status in (
        ({"Authorization": f"Bearer {stranger}"}, 404),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Origin": "https://elsewhere.example"}, 403),
        ({"Authorization": "Bearer x"}, 401),
    ):
        with trying(playground, token, service, CHAT, None, **headers) as response:
            assert response.status_code == status
            text = response.read().decode()
    assert "Sign in again" in text
    assert f"service={service}" not in playground.log


async def test_a_request_ends_when_its_browser_leaves(
    playground: ConsoleProcess, engine: EngineServer, service: str, token: str
) -> None:
    def leave() -> None:
        with trying(playground, token, service, LONG) as response:
            assert any(SAMPLED * 3 in each for each in read_changes(response))

    await asyncio.to_thread(leave)
    await asyncio.to_thread(engine.wait_load, running=0, waiting=0)


async def test_the_page_says_that_a_service_at_zero_wakes(
    playground: ConsoleProcess, gateway: GatewayProcess, cluster: Cluster, token: str
) -> None:
    service = f"{cluster.namespace}/tiny"
    cluster.apply_service("tiny", task="Generate")
    await asyncio.to_thread(playground.wait_for, "Most tokens", token, f"/services/{service}/try")

    def wait() -> None:
        with trying(playground, token, service, LONG) as response:
            assert any("The gateway holds the request until an engine is." in each for each in read_changes(response))
            assert (gateway.demand(service) or {})["queued"] == 1

    await asyncio.to_thread(wait)
    await asyncio.to_thread(wait_for, "the queue", lambda: not (gateway.demand(service) or {}).get("queued"))


async def test_a_user_has_a_limited_number_of_requests(
    playground: ConsoleProcess, engine: EngineServer, service: str, token: str
) -> None:
    def crowd() -> str:
        with ExitStack() as opened:
            responses = [
                opened.enter_context(trying(playground, token, service, LONG)) for _ in range(MAX_REQUESTS_EACH)
            ]
            running = [read_changes(each) for each in responses]  # httpx ends a response whose iterator is dropped
            assert all(any(SAMPLED * 3 in change for change in each) for each in running)
            return read_problem(send(playground, token, service, CHAT))

    assert (await asyncio.to_thread(crowd)).startswith("Too many requests run")
    await asyncio.to_thread(wait_for, "a place", lambda: not read_problem(send(playground, token, service, CHAT)))


def test_a_long_form_is_refused(playground: ConsoleProcess, service: str, token: str) -> None:
    problem = read_problem(send(playground, token, service, CHAT, ("x", bytes(MAX_FORM_BYTES))))
    assert problem.startswith("A form may have at most 256 KiB of text, and 8 MiB with a file.")
    many = [("turn", "x")] * 300
    assert "at most 256 values" in read_problem(send(playground, token, service, [*CHAT, *many]))


def test_without_a_gateway_there_is_no_such_page(console: ConsoleProcess, cluster: Cluster, token: str) -> None:
    cluster.apply_service("tiny", task="Generate")
    path = f"/services/{cluster.namespace}/tiny"
    assert "Try it" not in console.wait_for("Conditions", token, path)
    assert console.get(f"{path}/try", token).status == 404


def test_tasks_without_a_form_are_named(playground: ConsoleProcess, cluster: Cluster, token: str) -> None:
    cluster.apply_service("tiny")
    path = f"/services/{cluster.namespace}/tiny/try"
    assert "<form id" not in playground.wait_for("The task of this service is not known yet.", token, path)
    problem = read_problem(send(playground, token, f"{cluster.namespace}/tiny", CHAT))
    assert problem == "The console has no form for this service."
    cluster.set_status("tiny", model={"name": "tiny", "task": "Softmax"})
    playground.wait_for("The console has no form for the task Softmax.", token, path)


EVENT = {"choices": [{"delta": {"content": HOSTILE}, "finish_reason": "stop"}]}
ANSWERS = {
    "broken off": (b"data: " + json.dumps({"choices": [{"delta": {"content": "Hel"}}]}).encode() + b"\n\n", "complete"),
    "no event": (b"data: {]\n\n", "does not understand"),
    "an error": (b'data: {"error": {"code": "engine_failed", "message": "<b>no</b>"}}\n\n', "engine_failed: <b>no</b>"),
    "a long line": (b"data: " + b"x" * (1 << 20) + b"\n\n", "longer than the console shows"),
    "no end": (b": x\n" * (2 << 20), "longer than the console shows"),
    "hostile": (b"data: " + json.dumps(EVENT).encode() + b"\n\n", ""),
}


async def test_answers_of_a_hostile_engine_are_bounded_and_shown_as_text(
    kubeconfig: Path, system_namespace: str, cluster: Cluster, token: str
) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=ANSWERS[(await request.json())["messages"][0]["content"]][0])

    app = web.Application()
    app.router.add_post("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    cluster.apply_service("tiny", task="Generate")

    def ask() -> dict[str, str]:
        with ConsoleProcess(kubeconfig, system_namespace, "--playground-url", url) as console:
            console.wait_for("Most tokens", token, f"/services/{cluster.namespace}/tiny/try")
            return {name: send(console, token, f"{cluster.namespace}/tiny", [("message", name)]) for name in ANSWERS}

    for name, changes in (await asyncio.to_thread(ask)).items():
        problem = ANSWERS[name][1]
        assert problem in read_problem(changes) if problem else not read_problem(changes), name
        assert not re.search("<(script|img|b)>", changes), name
    assert read_text(changes) == HOSTILE.replace("\r\n", "\n")
    await runner.cleanup()
