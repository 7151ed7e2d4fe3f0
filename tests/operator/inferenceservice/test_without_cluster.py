"""`conveyor run` writes the engine's configuration with the bytes of the ConfigMap that the operator applies."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from tests.operator.inferenceservice.test_manifests import specs
from tests.operator.stage import Stage, make_service, wait_until

from conveyor_api import names
from conveyor_api.resource import InferenceService
from conveyor_local.files import Objects
from conveyor_local.machine import Machine
from conveyor_local.places import Places, open_places
from conveyor_local.plans import PodPlanner, Surroundings, build_all
from e2e.cluster.paths import REPOSITORY

Json = dict[str, Any]


def draw_services(number: int) -> list[Json]:
    """Return services with random specs, the same ones each time."""
    drawn: list[Json] = []

    @settings(max_examples=number, database=None, derandomize=True)
    @given(specs)
    def draw(spec: Json) -> None:
        drawn.append(make_service(f"drawn-{len(drawn)}", **copy.deepcopy(spec)))

    draw()
    return drawn


def list_examples() -> list[Json]:
    return [
        yaml.safe_load(path.read_text())
        for path in sorted((REPOSITORY / "examples").glob("*.yaml"))
        if path.stem != "vllm"  # its runtime needs an image
    ]


def write_config(body: Json, places: Places) -> tuple[str, bytes]:
    """Return the name of the ConfigMap and the bytes of the file that a run writes."""
    service, objects = InferenceService.parse(body), Objects()
    PodPlanner(service, build_all(service), Surroundings(places, objects, Machine(2, 1 << 30), {}))
    (key,) = objects.config_maps
    name = key.partition("/")[2]
    return name, (places.state / service.namespace / "config-maps" / name / names.ENGINE_CONFIG_KEY).read_bytes()


def compare(bodies: list[Json], stage: Stage, folder: Path) -> None:
    """Let an operator apply the services, and compare each ConfigMap with the file of a run."""
    claims = dict.fromkeys(("models", "claim"), folder)
    places = open_places(folder / "cache", claims)
    with stage.operator():
        for body in bodies:
            stage.space.api.create(stage.space.path("InferenceService"), body)
        for body in bodies:
            name, ours = write_config(body, places)
            theirs = wait_until(f"ConfigMap {name}", lambda name=name: stage.space.get("ConfigMap", name))
            assert theirs["data"] == {names.ENGINE_CONFIG_KEY: ours.decode()}
    places.lock.close()


def test_the_file_of_each_example_is_that_of_a_cluster(stage: Stage, tmp_path: Path) -> None:
    compare(list_examples(), stage, tmp_path)


@pytest.mark.slow
def test_the_file_of_random_services_is_that_of_a_cluster(stage: Stage, tmp_path: Path) -> None:
    compare(draw_services(30), stage, tmp_path)
