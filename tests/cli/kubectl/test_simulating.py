"""Tests `kubectl conveyor simulate`, as docs/autoscaling.md shows it."""

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from conveyor_kubectl.command import main

QUICK = ["--seconds=300", "--at=100", "--seeds=1"]


def write_service(folder: Path, **spec: object) -> str:
    body = {
        "apiVersion": "conveyor.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "a"},
        "spec": {"model": {"uri": "hf://example/model"}, **spec},
    }
    path = folder / "service.yaml"
    path.write_text(yaml.safe_dump(body))
    return f"--service={path}"


def test_a_load_of_ones_own_is_a_line_of_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    for trace in ("steady", "step", "ramp", "burst", "diurnal"):
        assert main(["simulate", f"--trace={trace}", *QUICK]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith("| scenario | peak replicas |")
        assert len(lines) == 3
        assert lines[2].startswith(f"| {trace} |")


def test_a_service_scales_as_its_spec_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    service = write_service(tmp_path, autoscaling={"minReplicas": 2, "maxReplicas": 3})
    assert main(["simulate", service, "--trace=step", "--high=9", *QUICK, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert {sample["replicas"] for sample in found["samples"]} == {2, 3}
    assert found["peak_replicas"] == 3


def test_arrivals_of_a_file_are_simulated_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file begins with a byte order mark, as Excel writes it."""
    arrivals, picture = tmp_path / "arrivals.csv", tmp_path / "picture.svg"
    arrivals.write_text("\ufeffat,seconds\n" + "".join(f"{second},20\n" for second in range(0, 200, 2)))
    assert main(["simulate", f"--csv={arrivals}", "--seeds=1", f"--plot={picture}"]) == 0
    assert str(arrivals) in capsys.readouterr().out
    drawing = ElementTree.parse(picture).getroot()
    assert [child.tag.rpartition("}")[2] for child in drawing].count("polyline") == 4
    assert main(["simulate", f"--csv={arrivals}", "--seeds=1", f"--plot={tmp_path / 'nowhere' / 'picture.svg'}"]) == 2
    output = capsys.readouterr()
    assert str(arrivals) in output.out, "a picture that cannot be written loses nothing else"
    assert "No such file or directory" in output.err


def test_what_cannot_be_simulated_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for spec, words in (
        ({}, "spec.autoscaling is not set"),
        ({"autoscaling": {"maxReplicas": 2}, "batching": {"mode": "Static"}}, "only the modes None and Continuous"),
        ({"autoscaling": {"maxReplicas": 0}}, "spec.autoscaling.maxReplicas"),
    ):
        assert main(["simulate", write_service(tmp_path, **spec)]) == 2
        errors = capsys.readouterr().err.splitlines()
        assert len(errors) == 1
        assert words in errors[0]
    assert main(["simulate", "--csv=/nowhere"]) == 2
    capsys.readouterr()
    file = tmp_path / "broken.yaml"
    for text in ("a: 1\n---\nb: 2\n", "a: [", "&a [*a]", "\x00"):
        file.write_text(text)
        assert main(["simulate", f"--service={file}"]) == 2
        errors = capsys.readouterr().err.splitlines()
        assert len(errors) == 1
        assert str(file) in errors[0]
    with pytest.raises(SystemExit):
        main(["simulate", "--seeds=0"])
    assert "--seeds: must be a whole number from 1 to 1000, not '0'" in capsys.readouterr().err


@pytest.mark.slow
def test_the_documented_command_prints_the_documented_table() -> None:
    """The program prints the table in docs/autoscaling.md."""
    page = (Path(__file__).resolve().parents[3] / "docs" / "autoscaling.md").read_text()
    command = [sys.executable, "-m", "conveyor_kubectl", "simulate"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout in page
    assert len(done.stdout.splitlines()) > 5


def test_help_names_the_scenarios() -> None:
    command = [sys.executable, "-m", "conveyor_kubectl", "simulate", "--help"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "step-start-300" in text
    assert "busy replicas" in text
