"""Tests the store of observed objects, by the resource to which they belong."""

from conveyor_operator.kinds import DEPLOYMENT, POD, Key, ObjectKind
from conveyor_operator.loop.store import Store

WIDGET = ObjectKind("tests.conveyor.dev", "v1", "Widget", "widgets")
GADGET = ObjectKind("tests.conveyor.dev", "v1", "Gadget", "gadgets")
KEY, OTHER = Key(WIDGET, "default", "qwen"), Key(WIDGET, "default", "other")


def make_store(kind: ObjectKind, *values: str) -> Store:
    store = Store()
    for number, value in enumerate(values):
        store.put(kind, f"uid-{number}", KEY, value)
    return store


def test_an_empty_store_knows_nothing() -> None:
    assert Store().uid(KEY) is None
    assert Store().resources(WIDGET) == []
    assert Store().drop(POD, "1") is None


def test_the_objects_of_one_resource_are_reported_in_the_order_in_which_they_became_known() -> None:
    store = make_store(POD, "b", "a")
    assert store.values(POD, KEY) == ["b", "a"]
    assert store.values(POD, OTHER) == store.values(DEPLOYMENT, KEY) == []


def test_resources_of_one_name_and_two_kinds_are_not_mixed() -> None:
    store, gadget = make_store(POD, "a"), KEY._replace(kind=GADGET)
    store.put(POD, "other", gadget, "b")
    assert (store.values(POD, KEY), store.values(POD, gadget)) == (["a"], ["b"])


def test_of_two_objects_of_one_name_the_later_one_counts() -> None:
    store = make_store(WIDGET, "old", "new")
    store.put(WIDGET, "uid-0", KEY, "old")
    assert store.uid(KEY) == "uid-1"
    assert store.drop(WIDGET, "uid-0") == KEY
    assert store.uid(KEY) == "uid-1"
    store.drop(WIDGET, "uid-1")
    assert (store.uid(KEY), store.resources(WIDGET)) == (None, [])


def test_a_follower_of_a_kind_gets_the_current_value_after_each_change() -> None:
    store, calls, other_calls = Store(), [], []
    store.follow(WIDGET, lambda key, value: calls.append((key, value)))
    store.follow(WIDGET, lambda key, value: other_calls.append((key, value)))
    store.put(WIDGET, "uid-0", KEY, "old")
    store.put(POD, "uid-9", KEY, "a")
    store.put(WIDGET, "uid-1", KEY, "new")
    store.drop(WIDGET, "uid-0")
    store.drop(WIDGET, "uid-1")
    assert calls == other_calls == [(KEY, "old"), (KEY, "new"), (KEY, "new"), (KEY, None)]


def test_an_object_that_changes_hands_leaves_its_former_owner() -> None:
    store = make_store(POD, "a")
    assert store.put(POD, "uid-0", OTHER, "a") == KEY
    assert (store.values(POD, KEY), store.values(POD, OTHER)) == ([], ["a"])


def test_keys_are_those_of_a_namespace() -> None:
    store = make_store(POD, "a")
    assert store.keys(POD, None) == store.keys(POD, "default") == {"uid-0": KEY}
    assert store.keys(POD, "other") == {}
    assert store.keys(DEPLOYMENT, None) == {}
