"""What the demo shows of a burst: the rows that matter, and words that fit."""

import io
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from e2e.cluster import programs
from e2e.cluster.paths import REPOSITORY
from e2e.demo import screen
from e2e.demo.picture import build_svg
from e2e.demo.story import Sample, Story, shown
from e2e.load import Answer, Load


def burst(num_samples: int = 300) -> Story:
    """One pod, wanted 3 after 2 s, there after 20 s, the end of the burst after 60 s, one pod at the end."""
    story = Story(began=0.0)
    for number in range(num_samples):
        at = number / 2
        desired, ready = (1, 1) if at < 2 else (3, 1) if at < 20 else (3, 3)
        if at > 60:
            story.burst_ended = 60.0
        if number == num_samples - 1:
            desired, ready = 1, 1
        story.note(Sample(at, queue_depth=6, in_flight=10, desired=desired, ready=ready))
    return story


def printed(story: Story, width: int = 160) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(screen.table(story, "demo"))
    return out.getvalue()


def test_the_row_of_the_decision_is_always_there() -> None:
    for num_samples in (10, 50, 300, 1000):
        story = burst(num_samples)
        rows = shown(story.samples, screen.ROWS)
        decisions = [sample for sample in rows if "HPA: 1 -> 3" in sample.event]
        assert [sample.at for sample in decisions] == [2.0], num_samples
        assert rows[-1] is story.samples[-1]
        assert len(rows) <= screen.ROWS + 1
    assert "HPA: 1 -> 3" in printed(burst())


def test_what_went_wrong_is_no_success() -> None:
    console = Console(file=io.StringIO())
    load = Load("http://gateway", {}, 10)
    assert screen.report(console, burst(), load)
    load.answers.append(Answer(started=0.0, finished=1.0, error="HTTP 503"))
    assert not screen.report(console, burst(), load)
    assert not screen.report(console, Story(began=0.0), Load("http://gateway", {}, 10))


@pytest.mark.parametrize("server", [None, "https://127.0.0.1:9"])
def test_without_a_demo_its_address_is_refused_in_one_sentence(tmp_path: Path, server: str | None) -> None:
    """`make demo-url` where nothing is up, and where a cluster is gone."""
    config = tmp_path / "kubeconfig"
    if server:
        config.write_text(
            "{apiVersion: v1, kind: Config, current-context: conveyor-local,"
            " contexts: [{name: conveyor-local, context: {cluster: local, user: admin}}],"
            f" clusters: [{{name: local, cluster: {{server: '{server}'}}}}], users: [{{name: admin, user: {{}}}}]}}"
        )
    answer = programs.run(
        "python", "-m", "e2e.gateway", env={"KUBECONFIG": str(config)}, cwd=REPOSITORY, capture_output=True, text=True
    )
    assert answer.returncode == 1
    assert answer.stderr == "there is no demo: `make demo` brings it up\n"
    assert sys.executable in answer.args


def test_the_picture_draws_every_curve_and_marks_every_event() -> None:
    drawn = build_svg(burst(), "1 -> 3 -> 1 & back")
    picture = ElementTree.fromstring(drawn)
    paths = {
        element.get("class", "").split()[0]: element.get("d", "")
        for element in picture.iter()
        if element.tag.endswith("path")
    }
    assert {"flight", "queue", "wanted", "ready"} <= paths.keys()
    assert paths["wanted"].count("V") == 2, "up to three, and back"
    words = [element.text for element in picture.iter() if element.tag.endswith("text")]
    assert [word for word in words if word and ": " in word] == [
        "0.0 s: burst", "2.0 s: HPA sets 3", "20.0 s: 3 ready", "60.0 s: burst over", "149.5 s: 1 again",
    ]  # fmt: skip
    assert "prefers-color-scheme:dark" in drawn
