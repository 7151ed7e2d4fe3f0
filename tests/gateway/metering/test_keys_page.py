"""Runs what the page of keys says about limits and usage: the command's limits, the chart's value, and the table."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web
from tests.gateway.engine_servers import answering
from tests.gateway.local import local_gateway, make_key

from conveyor_gateway.given_limits import GIVEN_LIMITS, GivenLimits
from conveyor_kubectl import usage
from conveyor_kubectl.command import build_parser
from conveyor_protocol.usage_rows import UsageRow
from e2e.cluster.paths import REPOSITORY

TEST = "test_the_page_s_limits_and_usage_are_those_of_a_gateway"
USED = {"prompt_tokens": 30, "cached_tokens": 8, "completion_tokens": 20}


def read_blocks() -> list[str]:
    """Return the page's blocks of this test."""
    page = (REPOSITORY / "docs/keys.md").read_text()
    return re.findall(rf"<!-- test: [^>]*::{TEST} -->\n```[a-z]*\n(.*?)```", page, re.DOTALL)


class FakeCluster:
    """Returns the ConfigMap that the operator would keep for a gateway's page."""

    def __init__(self, page: dict[str, Any]) -> None:
        self._data = {day: json.dumps({page["process"]: rows}) for day, rows in page["days"].items()}

    def find(self, path: str) -> dict[str, Any]:
        assert path == "/api/v1/namespaces/conveyor-system/configmaps/conveyor-usage"
        return {"data": self._data}


async def test_the_page_s_limits_and_usage_are_those_of_a_gateway(tmp_path: Path) -> None:
    create, values, command, table = read_blocks()
    flags = build_parser().parse_args(shlex.split(create)[2:])
    limits = {
        "requestsPerMinute": flags.requests_per_minute,
        "tokensPerMinute": flags.tokens_per_minute,
        "tokensPerDay": flags.tokens_per_day,
        "concurrentRequests": flags.concurrent_requests,
    }
    assert None not in limits.values()
    given = GIVEN_LIMITS.parse(json.dumps(yaml.safe_load(values)["gateway"]["limits"]))
    assert isinstance(given, GivenLimits)
    key, resource = make_key(f"{flags.namespace}/{flags.name}", limits=limits, services=["team/chat"])
    answer = answering(web.json_response, data={}, headers={"X-Engine-Usage": json.dumps(USED)})
    async with (
        local_gateway(answer, resource, settings={"limits": given}, access={"keyNamespaces": ["team-a"]}) as gateway,
        aiohttp.ClientSession() as http,
    ):
        for headers in ({"x-api-key": key}, {"x-api-key": key}, {}):
            async with http.post(f"{gateway.url}/completions", json={"prompt": "a"}, headers=headers) as got:
                assert got.status == 200
                left = got.headers.get("x-ratelimit-remaining-requests")
                assert (left is None) == (not headers)
        async with http.get(f"{gateway.admin_url}/usage") as got:
            page = await got.json()
    shown: list[str] = []
    flags = build_parser().parse_args(shlex.split(command)[2:])
    usage.show(FakeCluster(page), flags, shown.append)  # type: ignore[arg-type]
    assert shown[0].strip() == table.strip()


@pytest.mark.parametrize("since", ["0d", "7", "1w", "100d"])
def test_a_time_that_is_no_number_of_days_is_refused(since: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["usage", "--since", since])
    assert "must be a number of days such as 7d" in capsys.readouterr().err


def test_accounts_belong_to_their_own_namespace() -> None:
    rows = [UsageRow("team-a/chat", "system:serviceaccount:apps:web", "", 1, 1, 0, 1)]
    assert list(usage.sum_usage(rows, "namespace")) == ["apps"]
