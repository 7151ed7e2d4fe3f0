"""Tests the packaged chart of a release, and the bills of materials of the images."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from tests.chart.installation import CHART, helm, pods_of

from e2e.cluster.paths import CACHE, REPOSITORY

REGISTRY = "registry.example.com/conveyor"
DIGESTS = {name: f"sha256:{letter * 64}" for name, letter in (("control", "a"), ("engine", "b"))}
MAKEFILE = (REPOSITORY / "Makefile").read_text()


@pytest.fixture(scope="module")
def packaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    flags = [f"--{name}={digest}" for name, digest in DIGESTS.items()]
    command = [sys.executable, "charts/package.py", f"--registry={REGISTRY}", *flags]
    command.append(f"--out={tmp_path_factory.mktemp('packaged')}")
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=True)
    return Path(done.stdout.strip())


def test_a_packaged_chart_installs_its_own_images_by_their_digests(packaged: Path) -> None:
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["version"]
    assert packaged.name == f"conveyor-{version}.tgz"
    pods = pods_of([item for item in yaml.safe_load_all(helm("template", "conveyor", packaged)) if item])
    images = {spec["containers"][0]["image"] for spec in pods.values()}
    assert images == {f"{REGISTRY}/conveyor/control@{DIGESTS['control']}"}
    engine = f"--engine-image={REGISTRY}/conveyor/engine@{DIGESTS['engine']}"
    assert engine in pods["conveyor-operator"]["containers"][0]["args"]


def test_the_packaged_values_are_the_chart_s_but_for_these(packaged: Path) -> None:
    values = yaml.safe_load(helm("show", "values", packaged))
    assert values.pop("imageRegistry") == REGISTRY
    assert values["image"].pop("digest") == DIGESTS["control"]
    assert values["engine"]["image"].pop("digest") == DIGESTS["engine"]
    own = yaml.safe_load((CHART / "values.yaml").read_text())
    del own["imageRegistry"], own["image"]["digest"], own["engine"]["image"]["digest"]
    assert values == own


@pytest.mark.parametrize("image", ["control", "engine"])
def test_a_bill_of_materials_names_what_the_image_installs(image: str) -> None:
    """The bill has the same extras as the Dockerfile, and each package with its version."""
    folder = "operator" if image == "control" else "engine"
    in_image = re.findall(r"--extra (\w+)", (REPOSITORY / folder / "Dockerfile").read_text())
    in_bill = re.search(rf"^EXTRAS_{image} := (.*)$", MAKEFILE, re.MULTILINE)
    assert in_bill
    extras = re.findall(r"--extra (\w+)", in_bill[1])
    assert extras == in_image
    export = [f"{CACHE}/uv-{_uv_version()}/bin/uv", "export", "--quiet", "--locked", "--no-dev", "--no-emit-project"]
    export += [part for extra in extras for part in ("--extra", extra)]
    bill = json.loads(_run(*export, "--format=cyclonedx1.5"))
    listed = set(re.findall(r"^([\w.-]+)==([^ ;]+)", _run(*export), re.MULTILINE))
    assert bill["bomFormat"] == "CycloneDX"
    assert listed
    assert {(part["name"], part["version"]) for part in bill["components"]} == listed


def test_the_workflow_s_version_is_that_of_the_project_and_it_calls_what_is_here() -> None:
    text = (REPOSITORY / ".github" / "workflows" / "release.yaml").read_text()
    jobs = yaml.safe_load(text)["jobs"]
    assert set(jobs) == {"dry-run", "image", "index", "chart"}
    assert "make release-dry-run" in text
    assert "charts/package.py" in text
    for dockerfile in re.findall(r"file: (\S+Dockerfile)", text):
        assert (REPOSITORY / dockerfile).is_file()
    assert tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]


def test_every_action_is_named_by_its_commit() -> None:
    """A tag can be moved. The commit of Helm's action is not known here."""
    texts = [path.read_text() for path in (REPOSITORY / ".github" / "workflows").glob("*.yaml")]
    used = [line for text in texts for line in re.findall(r"uses: (.+)", text) if line != "azure/setup-helm@v4"]
    assert len(used) > 20
    assert not [line for line in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line)]


def test_the_images_install_uv_by_its_hashes() -> None:
    pinned = (REPOSITORY / "uv.txt").read_text()
    assert f"\nuv=={_uv_version()} " in pinned
    assert len(re.findall(r"--hash=sha256:[0-9a-f]{64}\b", pinned)) == 3
    for dockerfile in ("engine/Dockerfile", "operator/Dockerfile", "e2e/vllm/Dockerfile"):
        installs = re.findall(r"bin/pip install .*", (REPOSITORY / dockerfile).read_text())
        assert installs
        assert all(re.search(r" --require-hashes --requirement (/tmp)?/uv\.txt\b", line) for line in installs)


def _uv_version() -> str:
    found = re.search(r"^UV_VERSION := (\S+)$", MAKEFILE, re.MULTILINE)
    assert found
    return found[1]


def _run(*command: str) -> str:
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=True).stdout
