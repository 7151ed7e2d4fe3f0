"""What is committed is what the models say, and a difference is found."""

import subprocess
from pathlib import Path

import pytest
import yaml
from tests.api.conftest import REPOSITORY

from conveyor_api.crd import build_crds
from crds import generate
from crds.generate import main
from e2e.cluster.tools import binary


def test_the_committed_files_are_up_to_date() -> None:
    assert list(generate.stale_files(REPOSITORY)) == []


def test_check_fails_when_a_file_differs_and_generate_fixes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--check", "--root", str(tmp_path)]) == 1
    assert main(["--root", str(tmp_path)]) == 0
    assert main(["--check", "--root", str(tmp_path)]) == 0

    crd = tmp_path / "crds" / "inferenceservices.conveyor.dev.yaml"
    crd.write_text(crd.read_text() + "\n")
    capsys.readouterr()
    assert main(["--check", "--root", str(tmp_path)]) == 1
    assert "crds/inferenceservices.conveyor.dev.yaml is not what the models say" in capsys.readouterr().err


def test_generate_writes_only_what_changed(tmp_path: Path) -> None:
    assert len(generate.write_files(tmp_path)) == 7
    assert generate.write_files(tmp_path) == []


def test_the_charts_copy_renders_to_the_crd_and_is_kept(tmp_path: Path) -> None:
    rendered = _helm_template(tmp_path, "true")
    crds = list(yaml.safe_load_all(rendered))
    assert [crd["metadata"].pop("annotations") for crd in crds] == [{"helm.sh/resource-policy": "keep"}] * 3
    assert crds == build_crds()


def test_the_charts_copy_can_be_turned_off(tmp_path: Path) -> None:
    assert "CustomResourceDefinition" not in _helm_template(tmp_path, "false")


def test_braces_in_a_sentence_survive_helm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "build_crds", lambda: [{"kind": "X", "metadata": {"name": "a {{ .Values.b }} c"}}])
    assert yaml.safe_load(_helm_template(tmp_path, "true"))["metadata"]["name"] == "a {{ .Values.b }} c"


def _helm_template(folder: Path, create: str) -> str:
    """The chart's copy of the CRD through a real Helm, in a chart that has nothing else."""
    (folder / "templates").mkdir()
    (folder / "Chart.yaml").write_text("apiVersion: v2\nname: conveyor\nversion: 0.1.0\n")
    (folder / "templates" / "crd.yaml").write_text(generate.render_chart_crds(), encoding="utf-8")
    command = [binary("helm"), "template", "conveyor", folder, "--set", f"crds.create={create}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
