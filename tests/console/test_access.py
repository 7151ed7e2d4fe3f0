"""Tests how many reviews callers cost a real API server."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from kubernetes.aio.client import ApiClient
from tests.console.process import make_reader, request_token

from conveyor_console.access import Access
from conveyor_kube.watch import connect
from e2e.cluster.api import Api


async def test_tokens_of_one_user_share_the_reviews_of_rights(
    crd: Api, kubeconfig: Path, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reviews = Counter[str]()
    send = ApiClient.call_api

    async def count(client: ApiClient, *arguments: Any, **options: Any) -> Any:
        reviews[arguments[1].rpartition("/")[2]] += 1
        return await send(client, *arguments, **options)

    monkeypatch.setattr(ApiClient, "call_api", count)
    tokens = [await asyncio.to_thread(make_reader, crd, namespace)]
    tokens.append(await asyncio.to_thread(request_token, crd, namespace, "reader"))
    namespaces = [namespace, *(f"other-{number}" for number in range(19))]
    async with connect(str(kubeconfig)) as client:
        access = Access(client)

        async def look(token: str) -> frozenset[str]:
            caller = await access.identify(token)
            assert caller is not None
            return await access.find_visible(caller, namespaces)

        for _ in range(2):
            seen = await asyncio.gather(*(look(token) for token in tokens for _ in range(25)))
            assert set(seen) == {frozenset((namespace,))}
            assert reviews == {"tokenreviews": 2, "subjectaccessreviews": 21}
        other = await access.identify(await asyncio.to_thread(request_token, crd, namespace, "default"))
        assert other is not None
        assert not await access.find_visible(other, namespaces)
        assert [await access.identify("x") for _ in range(3)] == [None] * 3
    assert reviews == {"tokenreviews": 4, "subjectaccessreviews": 42}
