"""Tests the replay of recorded moments. The recorded HPA gives the recorded decisions; another spec gives its own."""

import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cli.insight.test_explaining import AUTOSCALING, BATCHING, NOW, make_facts
from tests.operator.builders import make_deployment

from conveyor_api import names
from conveyor_insight.explaining import explain
from conveyor_insight.facts import Counts, Facts
from conveyor_insight.replaying import Look, read_moments, replay
from conveyor_kubectl.command import main
from conveyor_kubectl.words import build_json
from e2e.cluster.paths import REPOSITORY


def record(*moments: Facts) -> str:
    """Return the lines that `explain -o json` writes when it runs every 15 s."""
    later = [replace(facts, now=NOW + timedelta(seconds=15 * number)) for number, facts in enumerate(moments)]
    return "".join(json.dumps(build_json(explain(facts)), indent=2) + "\n" for facts in later)


def numbers(looks: list[Look]) -> list[tuple[int, int]]:
    return [(look.moment.recorded, look.replayed) for look in looks]


def write(folder: Path, text: str, **spec: Any) -> list[str]:
    """Write the files and return the arguments of a replay with this spec."""
    samples, service = folder / "samples.json", folder / "qwen.yaml"
    samples.write_text(text)
    resource = {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {"name": "qwen", "namespace": "default"},
        "spec": {"model": {"uri": "hf://a/b"}, "batching": BATCHING, **spec},
    }
    service.write_text(yaml.safe_dump(resource))
    return ["replay", str(samples), "--service", str(service)]


RISE = record(*(make_facts(120, 20, asked=asked) for asked in (1, 3, 3, 3, 3, 4)))


def test_the_hpa_of_then_does_again_what_it_did() -> None:
    assert numbers(list(replay(read_moments(RISE)))) == [(1, 1), (3, 3), (3, 3), (3, 3), (3, 3), (4, 4)]


def test_another_behavior_does_otherwise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fast = {"scaleUp": {"policies": [{"type": "Pods", "value": 3, "periodSeconds": 15}]}}
    assert main(write(tmp_path, RISE, autoscaling=AUTOSCALING | {"behavior": fast})) == 0
    table, _, told = capsys.readouterr().out.partition("\n\n")
    assert [line.split()[1:] for line in table.splitlines()[1:4]] == [
        ["120", "20", "1", "1"],
        ["120", "20", "3", "4"],
        ["120", "20", "3", "4"],
    ]
    assert told == "recorded: 4 replicas at most, 2.8 on average; replayed: 4 replicas at most, 3.5 on average\n"


def test_the_documented_command_prints_the_documented_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sizes in docs/autoscaling.md."""
    page = (REPOSITORY / "docs" / "autoscaling.md").read_text()
    (command,) = [line for line in page.splitlines() if line.startswith("kubectl conveyor replay")]
    recorded = record(*(make_facts(120, 20, asked=asked) for asked in (1, 3, 3)))
    fast = {"scaleUp": {"policies": [{"type": "Pods", "value": 3, "periodSeconds": 15}]}}
    write(tmp_path, recorded, autoscaling=AUTOSCALING | {"behavior": fast})
    monkeypatch.chdir(tmp_path)
    assert main(command.split()[2:]) == 0
    assert capsys.readouterr().out in page


def test_what_could_not_be_read_then_cannot_be_read_in_the_replay() -> None:
    looks = list(replay(read_moments(record(make_facts("503", "503", asked=2), make_facts("503", 20, asked=2)))))
    assert [look.replayed for look in looks] == [2, 2]
    assert looks[0].moment.values == {names.IN_FLIGHT_METRIC: None, names.QUEUE_DEPTH_METRIC: None}


def test_zero_comes_and_goes_as_it_did() -> None:
    asleep = make_facts(0, 0, deployment=make_deployment(0))
    recorded = record(make_facts(90, 0, asked=3), asleep, make_facts(0, 0, asked=1))
    assert numbers(list(replay(read_moments(recorded)))) == [(3, 3), (0, 0), (1, 1)]


SLEEPY = {"minReplicas": 0, "maxReplicas": 4, "idleTimeout": "30s"}


@pytest.mark.parametrize(
    ("autoscaling", "replayed"),
    [(SLEEPY, ["1", "1", "1", "0", "0", "1"]), (AUTOSCALING, ["1", "1", "1", "1", "1", "1"])],
)
def test_another_spec_goes_to_zero_after_its_idle_timeout_and_back_with_a_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], autoscaling: dict[str, Any], replayed: list[str]
) -> None:
    moments = (make_facts(values, 0, asked=1) for values in (9, 0, 0, 0, 0, 3))
    assert main(write(tmp_path, record(*moments), autoscaling=autoscaling)) == 0
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()[1:7]] == replayed


def test_a_spec_that_keeps_an_engine_has_one_where_the_recorded_one_had_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asleep = make_facts(0, 0, deployment=make_deployment(0), autoscaling=SLEEPY)
    assert main(write(tmp_path, record(asleep, asleep), autoscaling=AUTOSCALING)) == 0
    assert [line.split()[-2:] for line in capsys.readouterr().out.splitlines()[1:3]] == [["0", "1"], ["0", "1"]]


def test_while_a_metric_cannot_be_read_no_engine_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    moments = record(*(make_facts("503", 0, asked=1) for _ in range(5)))
    assert main(write(tmp_path, moments, autoscaling=SLEEPY)) == 0
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()[1:6]] == ["1"] * 5


@pytest.mark.parametrize(
    ("text", "spec", "told"),
    [
        ("", {"autoscaling": AUTOSCALING}, "has an autoscaler"),
        (RISE + "{}", {"autoscaling": AUTOSCALING}, "document 7 is not from `explain -o json`"),
        (RISE + "{", {"autoscaling": AUTOSCALING}, "Expecting property name"),
        (RISE, {"replicas": 2}, "qwen has no autoscaler of Conveyor's"),
        (RISE, {"nothing": 2}, "nothing"),
    ],
)
def test_what_cannot_be_replayed_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, spec: dict[str, Any], told: str
) -> None:
    assert main(write(tmp_path, text, **spec)) == 1
    said = capsys.readouterr().err
    assert said.startswith("kubectl conveyor: cannot replay: ")
    assert told in said


def test_requests_for_starting_engines_are_counted_for_the_other_spec(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """40 requests at zero are a whole batch: one engine for any target, and two for half the batch."""
    facts = make_facts(30, 0, asked=1, deployment=make_deployment(1, ready_replicas=0), counts=Counts(40, 40))
    status = facts.service.status.model_copy(update={"starting_replicas": 1})
    moment = replace(facts, service=facts.service.model_copy(update={"status": status}))
    for spec, replayed in (({}, 1), ({"targetUtilizationPercent": 50}, 1)):
        assert main(write(tmp_path, record(moment, moment), autoscaling=AUTOSCALING | spec)) == 0
        assert f"replayed: {replayed} replicas at most" in capsys.readouterr().out
    main([*write(tmp_path, record(moment, moment), autoscaling=AUTOSCALING, batching={"maxBatchSize": 20})])
    assert "replayed: 2 replicas at most" in capsys.readouterr().out
