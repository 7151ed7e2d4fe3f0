"""Tests the page of mistakes on a real API server with the real kubectl."""

from pathlib import Path

import pytest
from tests.kubectl import kubectl
from tests.operator.inferenceservice.mistakes import REFUSED, REPORTED, Refused, Reported, build_table
from tests.operator.kubelet import Json, Kubelet
from tests.operator.stage import Stage, wait_until

from conveyor_api.names import INFERENCE_SERVICE_LABEL
from e2e.cluster.api import ApiError
from e2e.cluster.paths import REPOSITORY


def test_the_page_has_the_table() -> None:
    page = (REPOSITORY / "docs" / "troubleshooting.md").read_text()
    assert len(REFUSED) + len(REPORTED) == 25
    assert build_table() in page, f"docs/troubleshooting.md needs this table:\n{build_table()}"


@pytest.mark.parametrize("mistake", REFUSED, ids=lambda mistake: mistake.done)
def test_what_can_be_known_at_once_is_refused_with_a_sentence(mistake: Refused, stage: Stage) -> None:
    with pytest.raises(ApiError) as caught:
        mistake.do(stage.space)
    assert mistake.sentence in str(caught.value).replace('\\"', '"')


@pytest.mark.slow
def test_later_mistakes_are_reported_by_get_and_describe(stage: Stage, kubeconfig: Path) -> None:
    mistakes = {name_for(mistake): mistake for mistake in REPORTED if not mistake.quota}

    def play(pod: Json) -> Json | None:
        return mistakes[pod["metadata"]["labels"][INFERENCE_SERVICE_LABEL]].play(pod)

    with stage.operator(), Kubelet(stage.space, play):
        for name, mistake in mistakes.items():
            stage.space.make_service(name, **mistake.spec)
        for name, mistake in mistakes.items():
            look(stage, kubeconfig, name, mistake)


@pytest.mark.parametrize("mistake", [m for m in REPORTED if m.quota], ids=lambda mistake: mistake.done)
def test_problems_of_a_whole_namespace_are_reported_too(mistake: Reported, stage: Stage, kubeconfig: Path) -> None:
    stage.space.create("ResourceQuota", {"metadata": {"name": "none"}, "spec": {"hard": mistake.quota}})
    with stage.operator():
        stage.space.make_service("quota", **mistake.spec)
        look(stage, kubeconfig, "quota", mistake)


def name_for(mistake: Reported) -> str:
    """Return the name of a mistake's service. The refused child's name is part of its message."""
    return "refused-child" if mistake.reason == "ChildRefused" else f"mistake-{REPORTED.index(mistake)}"


def look(stage: Stage, kubeconfig: Path, name: str, mistake: Reported) -> None:
    stage.space.wait_condition(name, "Ready", mistake.ready, mistake.reason)
    wait_until("the sentence", lambda: mistake.sentence in stage.space.condition(name, "Ready")["message"])
    header, row = kubectl(kubeconfig, stage.space.namespace, "get", "infsvc", name).splitlines()
    assert header.split()[:3] == ["NAME", "READY", "REASON"]
    assert row.split()[:3] == [name, mistake.ready, mistake.reason]
    described = kubectl(kubeconfig, stage.space.namespace, "describe", "infsvc", name)
    assert mistake.sentence in " ".join(described.split())
    wait_until("its Event", lambda: warned(stage, kubeconfig, name, mistake.reason))


def warned(stage: Stage, kubeconfig: Path, name: str, reason: str) -> bool:
    rows = kubectl(kubeconfig, stage.space.namespace, "describe", "infsvc", name).partition("Events:")[2].splitlines()
    return any(row.split()[:2] == ["Warning", reason] for row in rows)
