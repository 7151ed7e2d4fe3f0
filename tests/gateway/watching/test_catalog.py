"""Tests the gateway's catalog of InferenceServices and EndpointSlices."""

import dataclasses
from dataclasses import asdict
from typing import Any

import msgspec
import pytest
from tests.api.builders import build_body, build_full_body
from tests.gateway.builders import claim
from tests.gateway.cluster import make_endpoint, make_service, make_slice

from conveyor_api.names import ENGINE_PORT_NAME
from conveyor_api.status import MAX_LISTED_ADAPTERS
from conveyor_gateway.watching.catalog import Catalog, Directory, Service, ServiceTable, parse_service
from conveyor_gateway.watching.slices import SliceTable, parse_slice
from conveyor_kube.resources import ServiceBody
from conveyor_kube.wanted_json import decode_item

CREATED = "2026-11-21T00:00:00Z"


class Changes:
    """A catalog, and the keys that it reported as changed."""

    def __init__(self) -> None:
        self.services: list[str] = []
        self.engines: list[str] = []
        self.catalog = Catalog()
        self.catalog.subscribe(self.services.append, self.engines.append)


def replace(table: ServiceTable | SliceTable, bodies: list[dict[str, Any]], namespace: str) -> None:
    """Replace all objects, as `watch` does after a list."""
    for _ in table.keep_only({table.put(body) for body in bodies}, namespace):
        pass


def test_engines_are_merged_once_for_each_change() -> None:
    """A page of a service with thousands of engines looks them up for each request."""
    slices = Changes().catalog.slices
    key, body = "default/qwen", make_slice("one", "default", "qwen", 8000, {"addresses": ["10.0.0.1"]})
    assert slices.engines(key) == {}
    slices.put(body)
    found = slices.engines(key)
    assert slices.engines(key) is found
    slices.put(make_slice("two", "default", "qwen", 8000, {"addresses": ["10.0.0.2"]}))
    assert set(slices.engines(key).values()) == {"10.0.0.1:8000", "10.0.0.2:8000"}
    slices.delete(body)
    assert set(slices.engines(key).values()) == {"10.0.0.2:8000"}


def make_doubtful(name: str, **conditions: bool) -> dict[str, Any]:
    target = {"name": name, "uid": f"uid-of-{name}"}
    endpoint = {"addresses": ["10.0.0.1"], "conditions": {"ready": False, **conditions}, "targetRef": target}
    return make_slice("one", "default", "qwen", 8000, endpoint)


def test_trust_in_an_engine_ends_with_its_pod_and_with_a_ready_engine() -> None:
    slices, key = Changes().catalog.slices, "default/qwen"
    slices.put(make_doubtful("a"))
    assert (slices.engines(key), slices.doubted) == ({}, {key})
    slices.trust(key, slices.find_doubtful(key))
    assert slices.engines(key) == {"uid-of-a": "10.0.0.1:8000"}
    slices.put(make_doubtful("b"))
    assert slices.engines(key) == {}, "another pod has the address now"
    slices.trust(key, slices.find_doubtful(key))
    ready = make_slice("two", "default", "qwen", 8000, {"addresses": ["10.0.0.2"]})
    slices.put(ready)
    assert (set(slices.engines(key).values()), slices.doubted) == ({"10.0.0.2:8000"}, set())
    slices.delete(ready)
    assert slices.engines(key) == {}, "it is asked again first"
    slices.put(make_doubtful("b", terminating=True))
    assert slices.doubted == set()


def test_objects_that_a_list_lacks_are_removed_one_at_a_time() -> None:
    """The event loop serves requests in between, however many services a tenant deletes at once."""
    changes = Changes()
    table = changes.catalog.services
    bodies = [make_service(f"s{number}", "a") for number in range(50)]
    keys = [table.put(body) for body in bodies]
    known = []
    for _ in table.keep_only(set(keys[:10]), ""):
        known.append(len(changes.catalog.directory.services))
    assert known == list(range(49, 9, -1))


def test_nothing_that_is_read_of_a_service_is_left_out_where_it_is_decoded() -> None:
    """Resource and shape both name the members. If only the resource renames a member, it would always seem absent."""
    full, bare = build_full_body(), build_body()
    full["metadata"] |= {"namespace": "default", "creationTimestamp": CREATED}
    full["spec"]["autoscaling"] |= {"minReplicas": 0, "idleTimeout": "7m"}
    starting = {"type": "Progressing", "status": "True", "reason": "StartingFromZero", "lastTransitionTime": CREATED}
    failing = {"type": "Ready", "status": "False", "reason": "ModelNotFound", "lastTransitionTime": CREATED}
    full["metadata"]["generation"] = 3
    status = {"desiredReplicas": 0, "startingReplicas": 1, "startingUntil": CREATED}
    status |= {"observedGeneration": 3, "conditions": [starting, failing]}
    status |= {"adapters": [{"name": "sql", "state": "Ready", "replicas": 1}]}
    full["status"] = {**full.get("status", {}), **status}
    bare["metadata"] |= {"namespace": "other"}
    bare["status"] = {"observedGeneration": 0}
    read = asdict(parse_service(full))
    assert asdict(parse_service(decode_item(msgspec.Raw(msgspec.json.encode(full)), ServiceBody))) == read
    of_bare = asdict(parse_service(bare))
    same = {name for name, value in read.items() if value == of_bare[name]}
    assert not same, "the full resource says something of everything that is read"


@pytest.mark.parametrize(
    ("reason", "status", "observed", "min_replicas", "found"),
    [
        ("ModelNotFound", "False", 2, 0, "ModelNotFound"),
        ("ImagePullFailed", "False", 2, 0, "ImagePullFailed"),
        ("ModelNotFound", "False", 1, 0, ""),  # of a former spec
        ("ModelNotFound", "False", 2, 1, "ModelNotFound"),  # never at zero
        ("ModelNotFound", "True", 2, 0, ""),  # a part of the engines fails
        ("OOMKilled", "False", 2, 0, ""),  # over with the restart, perhaps
        ("InsufficientGPU", "False", 2, 0, ""),  # a node may come
        ("ModelLoading", "False", 2, 0, ""),
    ],
)
def test_a_start_that_fails_for_good_is_known_by_its_reason(
    reason: str, status: str, observed: int, min_replicas: int, found: str
) -> None:
    body = make_service("qwen", "default", autoscaling={"minReplicas": min_replicas, "maxReplicas": 2})
    body["metadata"]["generation"] = 2
    ready = {"type": "Ready", "status": status, "reason": reason, "lastTransitionTime": CREATED}
    body["status"] = {"observedGeneration": observed, "desiredReplicas": 1, "conditions": [ready]}
    assert parse_service(body).start_failure == found


@pytest.mark.parametrize(
    ("observed", "progressing", "coming"),
    [(1, "False", True), (2, "True", True), (2, "False", False), (2, "Unknown", False)],
)
def test_a_rollout_brings_the_models_of_the_spec(observed: int, progressing: str, coming: bool) -> None:
    body = make_service("qwen", "default", adapters=[{"name": "sql", "uri": "hf://org/sql"}])
    body["metadata"]["generation"] = 2
    condition = {"type": "Progressing", "status": progressing, "reason": "RollingOut", "lastTransitionTime": CREATED}
    body["status"] = {"observedGeneration": observed, "conditions": [condition]}
    directory = Directory()
    directory.put(parse_service(body))
    named = {model: directory.is_coming("default/qwen", model) for model in ("qwen", "qwen:sql", "qwen:x", "sql", "")}
    assert named == {"qwen": coming, "qwen:sql": coming, "qwen:x": False, "sql": False, "": False}
    assert not directory.is_coming("default/other", "qwen")


@pytest.mark.parametrize(
    ("state", "replicas", "coming"),
    [("Loading", 0, True), ("Ready", 2, True), ("Failed", 1, True), ("Failed", 0, False)],
)
def test_engines_bring_an_adapter_without_a_rollout(state: str, replicas: int, coming: bool) -> None:
    body = make_service("qwen", "default", adapters=[{"name": "sql", "uri": "hf://org/sql"}])
    body["metadata"]["generation"] = 2
    sql = {"name": "sql", "state": state, "replicas": replicas}
    body["status"] = {"observedGeneration": 2, "conditions": [], "adapters": [sql]}
    directory = Directory()
    directory.put(parse_service(body))
    assert directory.is_coming("default/qwen", "qwen:sql") == coming
    assert not directory.is_coming("default/qwen", "qwen")


def test_adapters_that_a_full_list_leaves_out_are_ready() -> None:
    names = [f"a{number}" for number in range(MAX_LISTED_ADAPTERS + 1)]
    body = make_service("qwen", "default", adapters=[{"name": name, "uri": f"hf://org/{name}"} for name in names])
    for number, coming in ((MAX_LISTED_ADAPTERS, True), (MAX_LISTED_ADAPTERS - 1, False)):
        body["status"] = {"adapters": [{"name": name, "state": "Failed"} for name in names[:number]]}
        assert (names[-1] in parse_service(body).coming_adapters) is coming
        assert names[0] not in parse_service(body).coming_adapters


def test_a_service_carries_what_the_queue_needs() -> None:
    body = make_service(
        "qwen",
        "default",
        model={"uri": "hf://org/model", "name": "Qwen/Qwen3"},
        batching={"mode": "Dynamic", "maxBatchSize": 32, "window": "50ms"},
        queue={"maxRequests": 7, "timeout": "8s"},
        requestTimeout="9s",
    )
    body["metadata"]["creationTimestamp"] = CREATED
    expected = Service("default", "qwen", "Qwen/Qwen3", False, 1795219200, 32, 36, 0.05, 7, 8, 9)
    assert parse_service(body) == dataclasses.replace(expected, refuses_priority=True, is_rolling_out=True)


@pytest.mark.parametrize(
    ("spec", "message", "window_seconds"),
    [
        ({}, None, 0),
        ({}, "Generate", 0),
        ({}, "Rerank", 0.01),
        ({"task": "Embed"}, None, 0.01),
        ({"task": "Generate"}, "Embed", 0),
        ({"batching": {"mode": "Continuous"}}, "Classify", 0),
        ({"runtime": "VLLM", "engine": {"image": "vllm:1"}}, "Embed", 0),
    ],
    ids=str,
)
def test_batches_fill_up_where_the_task_has_such_a_mode_by_default(
    spec: dict[str, Any], message: str | None, window_seconds: float
) -> None:
    body = make_service("qwen", "default", model={"uri": "hf://org/model"}, **spec)
    body["status"] = {"model": {"uri": "hf://org/model", "task": message}} if message else {}
    assert parse_service(body).window_seconds == window_seconds
    if message:
        body["status"]["model"]["uri"] = "hf://org/the-one-before"
        assert parse_service(body).window_seconds == (0.01 if spec.get("task") == "Embed" else 0)


@pytest.mark.parametrize(
    ("engine", "status", "known"),
    [
        ({}, None, None),
        ({}, {}, None),
        ({"maxModelLen": 512}, None, 512),
        ({"maxModelLen": 512}, {"model": {"uri": "hf://org/model", "contextLength": 4096}}, 512),
        ({}, {"model": {"uri": "hf://org/model", "contextLength": 4096}}, 4096),
        ({}, {"model": {"uri": "hf://org/the-one-before", "contextLength": 4096}}, None),
    ],
)
def test_the_longest_request_is_the_spec_s_or_what_the_model_was_made_for(
    engine: dict[str, Any], status: dict[str, Any] | None, known: int | None
) -> None:
    body = make_service("qwen", "default", model={"uri": "hf://org/model"}, engine=engine)
    if status is not None:
        body["status"] = status
    assert parse_service(decode_item(msgspec.Raw(msgspec.json.encode(body)), ServiceBody)).max_model_len == known


@pytest.mark.parametrize(("context", "known"), [(None, None), (4096, 1024), (512, 512)])
def test_the_longest_request_follows_from_the_workload_once_the_model_is_known(
    context: int | None, known: int | None
) -> None:
    lengths = {"p50": 100, "p95": 200}
    workload = {"inputTokens": lengths, "outputTokens": lengths}
    body = make_service("qwen", "default", model={"uri": "hf://org/model"}, workload=workload)
    body["status"] = {"model": {"uri": "hf://org/model", "contextLength": context}} if context else {}
    assert parse_service(decode_item(msgspec.Raw(msgspec.json.encode(body)), ServiceBody)).max_model_len == known


@pytest.mark.parametrize(
    ("batching", "place_limit"),
    [({"mode": "None", "maxBatchSize": 32}, 2), ({"maxBatchSize": 1}, 2), ({"maxBatchSize": 64}, 72)],
)
def test_an_engine_has_places_for_its_batch_and_a_little_more(batching: dict[str, Any], place_limit: int) -> None:
    assert parse_service(make_service("qwen", "default", batching=batching)).place_limit == place_limit


@pytest.mark.parametrize(
    ("conditions", "is_taken"),
    [
        ({}, True),
        ({"ready": True, "serving": True, "terminating": False}, True),
        ({"ready": None}, True),  # nil means ready
        ({"ready": False}, False),
        ({"ready": False, "serving": True, "terminating": True}, False),
        ({"ready": True, "serving": True, "terminating": True}, False),
    ],
)
def test_only_engines_that_are_ready_and_stay_take_requests(conditions: dict[str, Any], is_taken: bool) -> None:
    endpoint = {"addresses": ["10.1.2.3"], "conditions": conditions}
    piece = parse_slice(make_slice("s", "default", "qwen", 8000, endpoint))
    assert piece.engines == ((("10.1.2.3:8000", "10.1.2.3:8000"),) if is_taken else ())


def test_an_ipv6_address_gets_brackets() -> None:
    body = make_slice("s", "default", "qwen", 8000, make_endpoint("fd00::1"), addressType="IPv6")
    assert parse_slice(body).engines == (("[fd00::1]:8000", "[fd00::1]:8000"),)


@pytest.mark.parametrize(
    "changes",
    [
        {"ports": [{"name": "metrics", "port": 1}]},
        {"ports": [{"name": ENGINE_PORT_NAME}]},
        {"ports": None},
        {"addressType": "FQDN"},
    ],
)
def test_a_slice_without_the_engines_port_or_with_names_has_no_engine(changes: dict[str, Any]) -> None:
    assert parse_slice(make_slice("s", "default", "qwen", 8000, make_endpoint("x"), **changes)).engines == ()


def test_a_pod_with_an_address_per_family_is_one_engine() -> None:
    changes = Changes()
    pod = {"targetRef": {"kind": "Pod", "uid": "pod-1"}}
    changes.catalog.slices.put(make_slice("v4", "default", "qwen", 8000, make_endpoint("10.1.2.3") | pod))
    changes.catalog.slices.put(
        make_slice("v6", "default", "qwen", 8000, make_endpoint("fd00::1") | pod, addressType="IPv6")
    )
    assert changes.catalog.engines("default/qwen") == ("10.1.2.3:8000",)
    assert changes.catalog.find_engine("default/qwen", "pod-1") == "10.1.2.3:8000"
    assert changes.catalog.find_engine("default/qwen", "pod-2") is None
    assert changes.catalog.find_engine("other/qwen", "pod-1") is None


def test_the_slices_of_a_service_add_up_and_each_change_is_reported_once() -> None:
    changes = Changes()
    first = make_slice("one", "default", "qwen", 8000, make_endpoint("10.0.0.1"))
    changes.catalog.slices.put(first)
    changes.catalog.slices.put(make_slice("two", "default", "qwen", 8000, make_endpoint("10.0.0.2")))
    changes.catalog.slices.put(first)  # nothing new
    assert changes.catalog.engines("default/qwen") == ("10.0.0.1:8000", "10.0.0.2:8000")
    changes.catalog.slices.delete(first)
    assert changes.catalog.engines("default/qwen") == ("10.0.0.2:8000",)
    assert changes.engines == ["default/qwen"] * 3


def test_a_slice_whose_label_is_edited_leaves_its_old_service() -> None:
    changes = Changes()
    changes.catalog.slices.put(make_slice("one", "default", "qwen", 8000, make_endpoint("10.0.0.1")))
    changes.catalog.slices.put(make_slice("one", "default", "llama", 8000, make_endpoint("10.0.0.1")))
    assert changes.catalog.engines("default/qwen") == ()
    assert changes.catalog.engines("default/llama") == ("10.0.0.1:8000",)


def test_a_list_replaces_everything_in_its_namespace_and_nothing_else() -> None:
    changes = Changes()
    for namespace, name in (("a", "old"), ("a", "kept"), ("b", "other")):
        changes.catalog.services.put(make_service(name, namespace))
        changes.catalog.slices.put(make_slice(name, namespace, name, 8000, make_endpoint("10.0.0.1")))
    changes.services.clear()
    replace(changes.catalog.services, [make_service("kept", "a"), make_service("new", "a")], "a")
    replace(changes.catalog.slices, [], "a")
    assert set(changes.catalog.directory.services) == {"a/kept", "a/new", "b/other"}
    assert sorted(changes.services) == ["a/new", "a/old"]
    assert (changes.catalog.engines("a/old"), changes.catalog.engines("b/other")) == ((), ("10.0.0.1:8000",))
    replace(changes.catalog.services, [], "")
    assert changes.catalog.directory.services == {}


def test_a_changed_model_name_moves_the_service_in_the_index() -> None:
    changes = Changes()
    changes.catalog.services.put(make_service("qwen", "default"))
    changes.catalog.services.put(make_service("qwen", "default", model={"uri": "hf://org/model", "name": "renamed"}))
    directory = changes.catalog.directory
    claim(directory, "default", "qwen")
    claim(directory, "default", "renamed")
    assert directory.find_model("qwen") is None
    assert directory.find_model("renamed") == (directory.services["default/qwen"], "")
    changes.catalog.services.delete(make_service("qwen", "default"))
    assert directory.find_model("renamed") is None
