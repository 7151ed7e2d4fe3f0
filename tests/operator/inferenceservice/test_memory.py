"""Tests what the operator remembers of a Deployment's pod template."""

from dataclasses import replace

from conveyor_operator.inferenceservice.memory import ServiceMemory
from conveyor_operator.inferenceservice.observed import DeploymentState


def test_a_lower_generation_replaces_the_remembered_one() -> None:
    """After etcd was restored, the Deployment's controller would not reach the remembered generation."""
    memory, restored = ServiceMemory("1"), DeploymentState(generation=2, template_hash="a")
    memory.see_template(None, replace(restored, generation=5))
    memory.see_template(restored, replace(restored, generation=6))
    assert memory.template_generation == 5
    memory.see_template(restored, restored)
    assert memory.template_generation == 2
