"""Tests what is queued when events arrive in another order than they happened.

Kopf keeps the order only for one uid.
"""

import asyncio
from typing import Any

from conveyor_operator.kinds import Key, ObjectKind
from conveyor_operator.loop.handlers import build_resource_handler
from conveyor_operator.loop.store import Store
from conveyor_operator.loop.workers import Outcome, Workers
from conveyor_operator.metrics import Metrics

WIDGET = ObjectKind("tests.conveyor.dev", "v1", "Widget", "widgets")


def make_event(type: str, uid: str) -> dict[str, Any]:
    metadata = {"name": "qwen", "namespace": "default", "uid": uid, "generation": 1}
    return {"type": type, "uid": uid, "name": "qwen", "namespace": "default", "meta": metadata}


async def reconciled_uids(*events: dict[str, Any]) -> list[str]:
    """Return the uids of the resources that existed when their reconciles ended."""
    store, done, changed = Store(), [], asyncio.Event()

    async def reconcile(key: Key) -> Outcome:
        await changed.wait()
        done.append(store.uid(key) or "none")
        return Outcome()

    workers = Workers(reconcile, Metrics(), limit=1)
    workers.start()
    mark = build_resource_handler(WIDGET, store, workers)
    for event in events:
        if event["type"] == "DELETED":
            store.drop(WIDGET, event["uid"])
        else:
            store.put(WIDGET, event["uid"], Key(WIDGET, event["namespace"], event["name"]), event["uid"])
        await mark(**event)
        await asyncio.sleep(0)
    changed.set()
    async with asyncio.timeout(120):
        while workers._workers:  # noqa: ASYNC110  it has no event for it
            await asyncio.sleep(0.001)
    await workers.stop()
    return done


async def test_the_work_on_a_service_that_is_gone_is_cancelled() -> None:
    assert await reconciled_uids(make_event("ADDED", "old"), make_event("DELETED", "old")) == []


async def test_the_end_of_the_former_service_does_not_cancel_the_work_on_its_successor() -> None:
    events = make_event("MODIFIED", "old"), make_event("ADDED", "new"), make_event("DELETED", "old")
    done = await reconciled_uids(*events)
    assert done
    assert set(done) == {"new"}
