"""Two teams and their keys on a whole cluster: from `kubectl conveyor key create` to `kubectl conveyor usage`.

The clients are OpenAI's. The last story turns the engines' own check on, which docs/keys.md describes.
"""

import asyncio
import json
import time
import uuid
from collections.abc import Iterator

import httpx
import openai
import pytest

from conveyor_api.names import ENGINE_PORT
from conveyor_insight.facts import Unanswered
from conveyor_kubectl.forwarding import forwarded
from e2e import kube
from e2e.deploy import install
from e2e.gateway import gateway_url, service_url
from e2e.services import provide_namespace, service

REVOKED_SECONDS = 2.0
LIMIT = 4  # requests a minute. With two gateways, each allows two


@pytest.fixture
def other_team() -> Iterator[str]:
    """The namespace of a team without services."""
    name = f"other-team-{uuid.uuid4().hex[:5]}"
    provide_namespace(name)
    yield name
    kube.kubectl("delete", "namespace", name, "--wait=false")


def create_key(name: str, namespace: str, *flags: str) -> str:
    return kube.kubectl("conveyor", "key", "create", name, "-n", namespace, *flags).strip()


def connect(key: str, namespace: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=service_url("chat", namespace), api_key=key, max_retries=0, timeout=60)


def chat(client: openai.OpenAI) -> int:
    """Return the tokens of a small chat."""
    answer = client.chat.completions.create(
        model="chat", messages=[{"role": "user", "content": "Hello"}], max_completion_tokens=4
    )
    assert answer.usage is not None
    return answer.usage.total_tokens


def find_status(client: openai.OpenAI) -> int:
    """Return the status with which a gateway lists the service's models, which needs the key and no engine."""
    try:
        client.models.list()
    except openai.APIStatusError as error:
        return error.status_code
    return 200


@pytest.mark.nightly
def test_two_teams_from_their_keys_to_their_usage(namespace: str, other_team: str) -> None:
    kube.apply(service("chat", access={"mode": "Required", "keyNamespaces": [other_team]}), namespace)
    own = create_key("ci", namespace, "--services=chat", "--owner=build")
    granted = create_key("app", other_team, f"--services={namespace}/chat", f"--requests-per-minute={LIMIT}")
    stranger = create_key("stranger", other_team)  # for the services of its own namespace, which has none
    kube.wait_ready("chat", namespace)
    client = connect(own, namespace)
    kube.wait_until("the gateways know the key", lambda: find_status(client) == 200 or None, 60)
    total = sum(chat(client) for _ in range(3))
    assert total > 0

    assert find_status(connect("sk-none", namespace)) == 401
    rejected = connect(stranger, namespace)
    with pytest.raises(openai.NotFoundError):
        chat(rejected)
    with pytest.raises(openai.NotFoundError):
        rejected.with_options(base_url=service_url("missing", namespace)).models.list()
    listed = httpx.get(f"{gateway_url()}/v1/models", headers={"Authorization": f"Bearer {stranger}"}).json()
    assert not any(namespace in model["id"] for model in listed["data"])

    limited = connect(granted, namespace)
    with pytest.raises(openai.RateLimitError) as refused:
        [chat(limited) for _ in range(LIMIT + 1)]
    headers = refused.value.response.headers
    assert 0 < float(headers["retry-after"]) <= 60
    assert (refused.value.code, headers["x-ratelimit-remaining-requests"]) == ("rate_limit_exceeded", "0")

    kube.kubectl("conveyor", "key", "revoke", "ci", "-n", namespace)
    began = time.monotonic()
    each_time = range(6)  # each client has a connection of its own, to one of the gateways
    kube.wait_until("the end", lambda: {find_status(connect(own, namespace)) for _ in each_time} == {401} or None, 30)
    assert time.monotonic() - began < REVOKED_SECONDS

    def find_usage(by: str) -> dict[str, int]:
        """Return the requests of each row. There is none before the operator has read the gateways."""
        try:
            totals = json.loads(kube.kubectl("conveyor", "usage", f"--by={by}", "--since=1d", "-o", "json"))
        except kube.CommandFailed:
            return {}
        return {name: total["requests"] for name, total in totals.items()}

    kube.wait_until("the usage", lambda: find_usage("key").get(f"{namespace}/ci") == 3 or None, 60)
    assert find_usage("key")[f"{other_team}/app"] >= 1
    assert find_usage("namespace").keys() >= {namespace, other_team}
    assert f"{other_team}/stranger" not in find_usage("key")


@pytest.mark.nightly
@pytest.mark.alone
def test_engines_answer_only_gateways_if_the_chart_says_so(namespace: str) -> None:
    kube.apply(service("chat"), namespace)
    kube.wait_ready("chat", namespace)
    client = connect("none", namespace)
    assert chat(client) > 0
    install("engine.access=Gateways")
    try:
        kube.wait_until("the new engine", lambda: find_direct(namespace) == 401 or None, 300)
        assert chat(client) > 0
        token = kube.kubectl("create", "token", "chat-engine", "-n", namespace, f"--audience=conveyor/{namespace}")
        assert find_direct(namespace, token.strip()) == 200
    finally:
        install("engine.access=Open")


def find_direct(namespace: str, token: str = "") -> int:
    """Return the status of a request to an engine itself; 0 if none answers."""
    return asyncio.run(_find_direct(namespace, {"Authorization": f"Bearer {token}"} if token else {}))


async def _find_direct(namespace: str, headers: dict[str, str]) -> int:
    try:
        async with forwarded(namespace, "deployment/chat-engine", ENGINE_PORT, ()) as url, httpx.AsyncClient() as http:
            return (await http.get(f"{url}/v1/models", headers=headers)).status_code
    except (Unanswered, httpx.TransportError):
        return 0
