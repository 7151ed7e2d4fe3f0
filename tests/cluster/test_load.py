"""Tests loading images into kind's nodes. Docker and kind are replaced by programs that record their arguments."""

import subprocess
from pathlib import Path

import pytest

from e2e.cluster import images, kind, load

IMAGE_ID = "0123456789abcdef"
DOCKER = """
echo "docker $@" >> {log}
case "$*" in
  "image inspect"*) echo sha256:{id} ;;
  *"images ls --quiet name==docker.io/conveyor/control:dev-"*) echo {loaded} ;;
  save*) echo "the archive of $2"; exit {save} ;;
esac
"""
KIND = """
echo "kind $@ < $(cat $3)" >> {log}
exit {load}
"""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path / "log"


def stand_in(log: Path, **answers: str) -> None:
    values = {"log": log, "id": IMAGE_ID, "loaded": "", "save": "0", "load": "0", **answers}
    for name, script in (("docker", DOCKER), ("kind", KIND)):
        program = log.parent / name
        program.write_text("#!/bin/bash" + script.format(**values))
        program.chmod(0o755)


def test_each_image_goes_to_the_one_node_that_runs_it_and_leaves_no_name_behind(log: Path) -> None:
    stand_in(log)
    load.load_into_kind()
    said = log.read_text().splitlines()
    for key, image in images.IMAGES.items():
        target = f"{image.repository}:dev-{IMAGE_ID[:12]}"
        node = f"--name {kind.NAME} --nodes {kind.NODES[key]}"
        assert f"kind load image-archive /dev/stdin {node} < the archive of {target}" in said
        assert said.index(f"docker rmi {target}") > said.index(f"docker tag {image.name} {target}")
        tag = f"images tag --force {target} {image.loaded_last}"
        assert f"docker exec {kind.NODES[key]} ctr --namespace k8s.io {tag}" in said


def test_an_image_that_a_node_has_is_not_sent_again(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stand_in(log, loaded="docker.io/conveyor/control:dev-0123456789ab")
    load.load_into_kind()
    assert [line.split("archive of ")[1] for line in log.read_text().splitlines() if line.startswith("kind load")] == [
        "docker.io/conveyor/engine:dev-0123456789ab"
    ]
    assert "docker.io/conveyor/control:dev-0123456789ab is loaded already" in capsys.readouterr().out


def test_an_image_of_one_story_is_built_on_the_way_and_kept_on_the_engines_node_alone(log: Path) -> None:
    stand_in(log)
    load.bring_to_kind("example/vllm:1", Path("e2e/vllm/Dockerfile"))
    said = [line for line in log.read_text().splitlines() if not line.startswith("docker exec")]
    assert said[0].startswith("docker build --tag example/vllm:1 --file e2e/vllm/Dockerfile ")
    assert f"--nodes {kind.NODES['engine']} < the archive of example/vllm:1" in said[-2]
    assert said[-1] == "docker rmi example/vllm:1"


def test_an_image_of_one_story_that_the_node_has_is_not_built_again(log: Path) -> None:
    stand_in(log, loaded="docker.io/conveyor/control:dev-0123456789ab")
    load.bring_to_kind("docker.io/conveyor/control:dev-0123456789ab", Path("Dockerfile"))
    assert "docker build" not in log.read_text()


@pytest.mark.parametrize(("broken", "command"), [("save", "docker save"), ("load", "kind load")])
def test_what_breaks_on_the_way_is_named_and_the_name_is_gone(log: Path, broken: str, command: str) -> None:
    stand_in(log, **{broken: "1"})
    with pytest.raises(subprocess.CalledProcessError) as caught:
        load.load_into_kind()
    assert f"/{command} " in " ".join(caught.value.cmd)
    assert "docker rmi docker.io/conveyor/control:dev-0123456789ab" in log.read_text().splitlines()
