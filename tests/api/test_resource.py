"""Reading a body: lenient about what Kubernetes and newer releases add, strict about what people write."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from tests.api.builders import Json, build_body, build_full_body

from conveyor_api.errors import InvalidResource, Problem
from conveyor_api.resource import InferenceService

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def problems_of(body: Json) -> tuple[Problem, ...]:
    """What is wrong with `body`; nothing if it is read."""
    try:
        InferenceService.parse(body)
    except InvalidResource as refused:
        return refused.problems
    return ()


def test_what_kubernetes_adds_to_metadata_is_ignored() -> None:
    body = build_body()
    body["metadata"] |= {"namespace": "team", "uid": "1", "managedFields": [{}], "finalizers": ["x"]}
    assert InferenceService.parse(body).key == "team/qwen"


def test_an_item_of_a_list_needs_no_kind() -> None:
    body = build_body()
    del body["apiVersion"], body["kind"]
    assert InferenceService.parse(body).kind == "InferenceService"


def test_another_kind_is_refused() -> None:
    with pytest.raises(InvalidResource, match="kind: "):
        InferenceService.parse(build_body() | {"kind": "Deployment"})


def test_a_newer_status_is_read_as_far_as_it_is_known() -> None:
    body = build_body() | {"status": {"replicas": 2, "phase": "Ready", "model": {"name": "q", "size": 1}}}
    assert InferenceService.parse(body).status.replicas == 2


def test_a_field_of_a_newer_release_is_ignored_unless_only_known_ones_may_be_there() -> None:
    model = {"uri": "hf://org/name", "signature": "x"}
    body = build_body(model=model, queue={"apiKeyRequired": False}, sharing={"mode": "None"})
    assert InferenceService.parse(body) == InferenceService.parse(build_body(model={"uri": "hf://org/name"}))
    with pytest.raises(InvalidResource) as caught:
        InferenceService.parse(body, known_only=True)
    assert {problem.path for problem in caught.value.problems} == {
        "spec.model.signature", "spec.queue.apiKeyRequired", "spec.sharing"
    }  # fmt: skip


def test_the_served_name_is_the_resources_unless_said() -> None:
    assert InferenceService.parse(build_body()).served_model_name == "qwen"
    named = build_body(model={"uri": "hf://a/b", "name": "Qwen/Qwen3"})
    assert InferenceService.parse(named).served_model_name == "Qwen/Qwen3"


def test_snake_case_is_for_python_only() -> None:
    with pytest.raises(InvalidResource, match=r"spec\.kv_cache: unknown field"):
        InferenceService.parse(build_body(kv_cache={}), known_only=True)


@pytest.mark.parametrize(("field", "value"), [("replicas", True), ("replicas", "1"), ("replicas", 1.5)])
def test_values_are_not_bent_into_their_type(field: str, value: object) -> None:
    with pytest.raises(InvalidResource, match=rf"spec\.{field}: "):
        InferenceService.parse(build_body(**{field: value}))


def test_a_manifest_reads_back_as_the_same_resource() -> None:
    service = InferenceService.parse(build_full_body())
    assert InferenceService.parse(json.loads(json.dumps(service.to_manifest()))) == service


def test_a_resource_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        InferenceService.parse(build_body()).spec.replicas = 2  # type: ignore[misc]


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(["metadata", "spec", "status", "kind"]), json_values))
def test_any_body_is_read_or_refused_with_problems(body: Json) -> None:
    assert all(problem.path and problem.message for problem in problems_of(body))


@settings(deadline=None)
@given(st.data())
def test_a_wrong_value_anywhere_in_the_spec_raises_nothing_else(data: st.DataObject) -> None:
    body = build_full_body()
    holder: Json | list[object] = body["spec"]
    while True:
        key = data.draw(st.sampled_from(list(holder) if isinstance(holder, dict) else range(len(holder))))
        inner = holder[key]
        if not isinstance(inner, dict | list) or not inner or data.draw(st.booleans()):
            break
        holder = inner
    holder[key] = data.draw(json_values)
    assert all(problem.path.startswith("spec") and problem.message for problem in problems_of(body))
