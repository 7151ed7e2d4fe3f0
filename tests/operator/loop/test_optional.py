"""Tests kinds that the cluster may lack. Their presence is reported once it is known, and when it changes."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from tests.operator.builders import make_services

from conveyor_operator.errors import Unavailable
from conveyor_operator.kinds import SCALED_OBJECT, Key, ObjectKind
from conveyor_operator.loop import optional
from conveyor_operator.loop.optional import OptionalKinds
from conveyor_operator.loop.store import Store
from conveyor_operator.loop.watches import Watches
from conveyor_operator.metrics import Metrics


class Discovery:
    """Answers like `cluster.Cluster`, with these answers one after the other, and then always with the last one."""

    client = None

    def __init__(self, *answers: bool | None) -> None:
        self.num_calls = 0
        self._answers: Iterator[bool | None] = iter(answers)
        self._last: bool | None = None

    async def is_served(self, kind: ObjectKind) -> bool:
        self.num_calls += 1
        self._last = next(self._answers, self._last)
        if self._last is None:
            raise Unavailable(503, "", "not now")
        return self._last


async def follow(
    monkeypatch: pytest.MonkeyPatch, discovery: Discovery, expected: bool = True, fails: bool = True
) -> list[tuple[bool | None, int]]:
    """What is told, with the number of ScaledObjects that are known then; each watch finds one.

    With `fails` each watch fails again and again.
    """
    store, changes = Store(), []
    services = make_services()
    watches = Watches([services], store, Metrics(), lambda key, urgent=True: None)
    key = Key(services.kind, "a", "qwen")

    async def watch(*arguments: Any) -> None:
        store.put(SCALED_OBJECT, "uid", key, "value")
        while fails:
            await asyncio.sleep(0.01)
            arguments[-1]()
        await asyncio.Event().wait()

    monkeypatch.setattr(optional, "watch_collection", watch)
    monkeypatch.setattr(optional, "_LOOK_SECONDS", 0.01)

    def notify() -> None:
        changes.append((kinds.serves(SCALED_OBJECT) if expected else None, len(store.values(SCALED_OBJECT, key))))

    kinds = OptionalKinds(discovery, [services], watches, (), notify)  # type: ignore[arg-type]
    if expected:
        assert kinds.serves(SCALED_OBJECT) is None
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await kinds.run()
    return changes


async def test_an_optional_api_that_comes_and_goes_is_reported_and_its_objects_are_dropped_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changes = await follow(monkeypatch, Discovery(None, False, False, True, True, True, False, True))
    assert changes == [(False, 0), (True, 0), (False, 0), (True, 0)]


async def test_an_api_server_that_does_not_answer_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await follow(monkeypatch, Discovery(True, True, None, None)) == [(True, 0)]
    assert await follow(monkeypatch, Discovery(None)) == []


@pytest.mark.parametrize(("answer", "expected"), [(False, False), (True, True)])
async def test_the_operator_reads_nothing_that_is_unused_or_watched(
    monkeypatch: pytest.MonkeyPatch, answer: bool, expected: bool
) -> None:
    discovery = Discovery(answer)
    assert len(await follow(monkeypatch, discovery, expected=expected, fails=False)) == 1
    assert discovery.num_calls <= 2, "once to find it, once when the watch began"


async def test_one_that_is_missing_is_looked_for_while_somebody_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    discovery = Discovery(False)
    assert await follow(monkeypatch, discovery) == [(False, 0)]
    assert discovery.num_calls > 5
