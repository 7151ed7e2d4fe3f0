"""From an InferenceService to its children on a real API server, and back again."""

from tests.operator.stage import Stage


def test_an_inference_service_gets_all_its_children(stage: Stage) -> None:
    with stage.operator():
        stage.space.make_service()
        children = stage.space.wait_children("qwen")
    kinds = sorted(kind for kind, _ in children)
    assert kinds == ["ConfigMap", "Deployment", "PodDisruptionBudget", "Service", "Service", "ServiceAccount"]
