"""Tests how one object of a real API server is followed: now, after every change, and when it does not exist."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.operator.metrics_api.steps import until
from tests.operator.stage import Json, Stage

from conveyor_kube.kubeconfig import load_configuration
from conveyor_operator.cluster import Cluster
from conveyor_operator.kinds import CONFIG_MAP, Key
from conveyor_operator.metrics import Metrics
from conveyor_operator.metrics_api.following import follow


@asynccontextmanager
async def following(stage: Stage, name: str) -> AsyncIterator[list[Json | None]]:
    """Follow the object. Yields the list of all reported states."""
    values_seen: list[Json | None] = []
    key = Key(CONFIG_MAP, stage.space.namespace, name)
    async with Cluster(await load_configuration(stage.settings.kubeconfig), Metrics()) as cluster:
        task = asyncio.create_task(follow(cluster, key, values_seen.append))
        yield values_seen
        assert not task.done(), task.exception()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def values(values_seen: list[Json | None]) -> list[str | None]:
    return [found["data"]["a"] if found is not None else None for found in values_seen]


def write(stage: Stage, name: str, value: str) -> None:
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"a": value}}
    stage.space.apply("ConfigMap", body)


async def test_an_object_is_reported_when_it_comes_changes_goes_and_comes_again(stage: Stage) -> None:
    async with following(stage, "one") as values_seen:
        await until("that there is none", lambda: values_seen == [None])
        for value in ("1", "2"):
            await asyncio.to_thread(write, stage, "one", value)
            await asyncio.to_thread(write, stage, "another", value)
        await until("both states", lambda: values(values_seen) == [None, "1", "2"])
        await asyncio.to_thread(stage.space.delete, "ConfigMap", "one")
        await until("its end", lambda: values(values_seen) == [None, "1", "2", None])
        await asyncio.to_thread(write, stage, "one", "3")
        await until("the next one", lambda: values(values_seen)[-1] == "3")


async def test_what_happens_while_the_connection_is_broken_is_reported_afterwards(stage: Stage) -> None:
    await asyncio.to_thread(write, stage, "one", "1")
    async with following(stage, "one") as values_seen:
        await until("it", lambda: values(values_seen) == ["1"])
        stage.proxy.sever()
        await asyncio.to_thread(stage.space.delete, "ConfigMap", "one")
        stage.proxy.severed = False
        await until("its end", lambda: values_seen[-1] is None)


async def test_an_object_that_is_nested_too_deeply_for_a_reader_is_reported_too(stage: Stage) -> None:
    """This is possible because the API server does not check managedFields with a schema."""
    fields = '{"f:a":' * 3000 + "{}" + "}" * 3000
    entry = '{"manager":"m","operation":"Update","apiVersion":"v1","fieldsType":"FieldsV1","fieldsV1":' + fields + "}"
    metadata = f'{{"name":"one","managedFields":[{entry}]}}'
    body = f'{{"apiVersion":"v1","kind":"ConfigMap","metadata":{metadata},"data":{{"a":"1"}}}}'
    async with following(stage, "one") as values_seen:
        await until("that there is none", lambda: values_seen == [None])
        await asyncio.to_thread(stage.space.api.send, "POST", stage.space.path("ConfigMap"), body.encode())
        await until("it", lambda: values(values_seen) == [None, "1"])
