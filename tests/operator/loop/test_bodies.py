"""Tests what is kept of resources, and its limits."""

import random
from typing import Any

from conveyor_operator.inferenceservice.kinds import INFERENCE_SERVICE
from conveyor_operator.kinds import Key
from conveyor_operator.loop import bodies
from conveyor_operator.loop.bodies import Bodies

KEY = Key(INFERENCE_SERVICE, "default", "a")


def build(uid: str = "1", version: str | None = "5", **spec: Any) -> dict[str, Any]:
    return {"metadata": {"uid": uid, "name": "a", "resourceVersion": version, "managedFields": [{}]}, "spec": spec}


def incompressible(size: int) -> str:
    return random.Random(0).randbytes(size // 2).hex()


def test_a_resource_is_kept_without_its_managed_fields_until_it_is_gone() -> None:
    kept = Bodies()
    assert kept.get("1") is None
    kept.put(KEY, build(x=1))
    assert kept.get("1") == {"metadata": {"uid": "1", "name": "a", "resourceVersion": "5"}, "spec": {"x": 1}}
    kept.drop("1")
    kept.drop("1")
    assert kept.get("1") is None


def test_a_watch_that_lags_behind_does_not_bring_back_an_older_version() -> None:
    kept = Bodies()
    kept.put(KEY, build(version="10", x=2))
    kept.put(KEY, build(version="9", x=1))
    assert (kept.get("1") or {})["spec"] == {"x": 2}
    kept.put(KEY, build(version="10", x=2))
    kept.put(KEY, build(version="11", x=3))
    assert (kept.get("1") or {})["spec"] == {"x": 3}
    kept.put(Key(INFERENCE_SERVICE, "default", "a"), build(uid="2", version="1", x=4))
    assert (kept.get("2") or {})["spec"] == {"x": 4}, "another object"


def test_versions_of_a_list_count_though_they_are_lower() -> None:
    """This happens after a restore of etcd."""
    kept = Bodies()
    kept.put(KEY, build(version="100", x=1))
    kept.put(KEY, build(version="7", x=2), listed=True)
    kept.put(KEY, build(version="8", x=3))
    assert (kept.get("1") or {})["spec"] == {"x": 3}


def test_versions_that_are_no_numbers_replace_each_other() -> None:
    kept = Bodies()
    for version in ("b", "a", None):
        kept.put(KEY, build(version=version, x=str(version)))
        assert (kept.get("1") or {})["spec"] == {"x": str(version)}


def test_what_exceeds_a_bound_is_not_kept_and_an_older_state_of_it_is_not_either() -> None:
    kept = Bodies()
    kept.put(KEY, build(version="1", x=1))
    kept.put(KEY, build(version="2", x=incompressible(4 * bodies.OBJECT_BYTES)))
    assert kept.get("1") is None


def test_a_namespace_takes_no_room_from_others() -> None:
    kept, text = Bodies(), incompressible(bodies.OBJECT_BYTES)
    count = bodies.NAMESPACE_BYTES // bodies.OBJECT_BYTES * 2
    for number in range(count):
        kept.put(KEY, build(uid=str(number), x=text))
    held = [kept.get(str(number)) is not None for number in range(count)]
    assert 0 < held.count(True) < count
    assert held[0]
    assert not held[-1]
    other = Key(INFERENCE_SERVICE, "other", "b")
    kept.put(other, build(uid="other"))
    assert kept.get("other") is not None
    kept.drop("0")
    kept.put(KEY, build(uid="late", x=text))
    assert kept.get("late") is not None, "what is gone makes room"


def test_all_namespaces_together_have_a_bound() -> None:
    kept = Bodies(total_bytes=1000)
    for number in range(20):
        kept.put(Key(INFERENCE_SERVICE, f"n{number}", "a"), build(uid=str(number)))
    assert kept.get("0") is not None
    assert kept.get("19") is None
