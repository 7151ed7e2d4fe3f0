"""Tests which images are kept and which are removed. buildah and ctr are replaced by programs that record what they
remove.

This matters for gigabytes: the engine's image has six, and is in both stores.
"""

from pathlib import Path

import pytest

from e2e.cluster import buildah
from e2e.cluster.containerd import Containerd

BUILDAH = """
case "$*" in
  *" build "*) printf "STEP 1/2\n--> Using cache aaaaaaaaaaaa0000\n--> aaaaaaaaaaa\n--> bbbbbbbbbbb\n" ;;
  *"images --all"*) printf "sha256:aaaaaaaaaaaa0000 <none>\nsha256:cccccccccccc0000 <none>\n"
                    printf "sha256:dddddddddddd0000 docker.io/conveyor/engine\nsha256:eeeeeeeeeeee0000 <none>\n" ;;
  *" inspect "*) echo base ;;
  *" rmi "*) echo "$@" >> {log} ;;
esac
"""
CTR = """
case "$*" in
  *"images ls"*) printf "%s\n" "REF TYPE DIGEST" "pause:1 manifest sha256:1" "engine:new manifest sha256:2" \\
                 "engine:old manifest sha256:3" "sha256:20 manifest sha256:2" "sha256:30 manifest sha256:3" ;;
  *" rm "*) echo "$@" >> {log} ;;
esac
"""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for name, script in (("buildah", BUILDAH), ("ctr", CTR)):
        (tmp_path / name).write_text("#!/bin/bash" + script.format(log=tmp_path / "log"))
        (tmp_path / name).chmod(0o755)
    return tmp_path / "log"


def test_layers_that_the_latest_builds_did_without_go(log: Path) -> None:
    used = buildah.build("docker.io/conveyor/control:dev", Path("Dockerfile"))
    assert used == {"aaaaaaaaaaa", "bbbbbbbbbbb"}
    buildah.prune(used)
    assert log.read_text().split("rmi ")[1].split() == ["cccccccccccc0000", "eeeeeeeeeeee0000"]


def test_nothing_is_removed_where_nothing_is_left_over(log: Path) -> None:
    buildah.prune({"aaaaaaaaaaa", "ccccccccccc", "eeeeeeeeeee"})
    assert not log.exists()


def test_an_image_that_is_not_kept_loses_the_kubelets_name_too(log: Path) -> None:
    Containerd("ctr").keep_images(["pause:1", "engine:new", "engine:never-loaded"])
    assert log.read_text().split("rm ")[1].split() == ["--sync", "engine:old", "sha256:30"]
