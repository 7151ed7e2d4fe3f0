"""What bad input gets: from the API server its sentence, from the parser the same."""

import json
import re
from typing import Any

import pytest
from tests.api.bad_builders import Bad
from tests.api.bad_services import BAD_SERVICES
from tests.api.conftest import Services

from conveyor_api.crd import build_schema
from conveyor_api.errors import InvalidResource
from conveyor_api.resource import InferenceService
from e2e.cluster.api import ApiError


def sentences(node: Any) -> set[str]:
    """The sentences of all rules in a schema."""
    if isinstance(node, list):
        return set().union(*(sentences(entry) for entry in node))
    if not isinstance(node, dict):
        return set()
    own = {rule["message"] for rule in node.get("x-kubernetes-validations", [])}
    return own.union(*(sentences(member) for member in node.values()))


SENTENCES = sentences(build_schema())
each_bad_service = pytest.mark.parametrize("bad", BAD_SERVICES, ids=lambda bad: bad.title)


@each_bad_service
def test_the_api_server_refuses_with_the_sentence(bad: Bad, services_in_default: Services) -> None:
    with pytest.raises(ApiError) as caught:
        services_in_default.create(bad.body)
    message = json.loads(str(caught.value).partition(": ")[2])["message"]
    assert bad.sentence in message
    if bad.path != "metadata.name":  # rules about the name stand at the top of the object
        assert bad.path in message


@each_bad_service
def test_the_parser_refuses_it_too(bad: Bad) -> None:
    with pytest.raises(InvalidResource) as caught:
        InferenceService.parse(bad.body, known_only=True)
    assert [problem for problem in caught.value.problems if problem.path == _path(bad)], str(caught.value)
    if any(bad.sentence in sentence for sentence in SENTENCES):
        assert bad.sentence in str(caught.value)


def _path(bad: Bad) -> str:
    """Kubernetes writes `limits[memory]`, the parser `limits.memory`; both write `limits[nvidia.com/gpu]`."""
    return re.sub(r"\[([a-z]+)\]", r".\1", bad.path)


# What may not follow on what was there: no resource is bad by itself. `test_admission` tries these.
BAD_CHANGES = (
    "spec.engine.maxModelLen exceeds the context length of the model",
    "the claim of spec.model.cache was made for one pod",
    "size of an existing claim can only grow",
    "storageClassName of an existing claim cannot change",
    "spec.kvCache.blockBudget x blockSize is less than the context length of the model",
    "of spec.workload exceed the context length of the model",
)


def test_every_rule_refuses_something() -> None:
    """A rule without a bad resource in the table, or a bad change in a test, might never hold anything back."""
    tried = [*(bad.sentence for bad in BAD_SERVICES), *BAD_CHANGES]
    assert not {sentence for sentence in SENTENCES if not any(words in sentence for words in tried)}


def test_all_problems_are_named_at_once() -> None:
    body = {"metadata": {"name": "x"}, "spec": {"model": {"uri": "?"}, "replicas": -1, "drain": {"x": 1}}}
    with pytest.raises(InvalidResource) as caught:
        InferenceService.parse(body, known_only=True)
    assert {problem.path for problem in caught.value.problems} == {"spec.model.uri", "spec.replicas", "spec.drain.x"}
