"""Bad input at the first door: the API server refuses it with a sentence; a bad child shows as a condition."""

import pytest

from e2e import kube
from e2e.services import service


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"batching": {"mode": "Continuous", "window": "10ms"}}, "window"),
        ({"model": {"uri": "http://example.org/model"}}, "uri"),
        ({"batching": {"mode": "Continuos"}}, "Continuos"),
        ({"kvCache": {"blockBudget": 4, "blockSize": 16}, "engine": {"maxModelLen": 512}}, "blockBudget"),
        ({"unknownField": True}, "unknownField"),
    ],
)
def test_a_bad_spec_is_refused_with_a_sentence(change: dict, sentence: str, namespace: str) -> None:
    with pytest.raises(kube.CommandFailed, match=sentence):
        kube.apply(service("bad", **change), namespace)


def test_a_child_that_the_cluster_refuses_shows_as_a_condition(namespace: str) -> None:
    kube.apply(service("bad", pod={"nodeSelector": {"not a label": "x"}}), namespace)
    message = kube.wait_until("a condition that says why", lambda: why_not_ready("bad", namespace), 60)
    assert "not a label" in message


def why_not_ready(name: str, namespace: str) -> str | None:
    conditions = ((kube.get("infsvc", name, namespace) or {}).get("status") or {}).get("conditions") or []
    refused = [c["message"] for c in conditions if c["status"] == "False" and "nodeSelector" in c["message"]]
    return refused[0] if refused else None
