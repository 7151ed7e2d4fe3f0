"""Tests the repository's own rules about its entry points, its checks and its images."""

import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import conveyor_engine
import conveyor_gateway
from e2e.cluster.images import IMAGES
from e2e.cluster.paths import REPOSITORY
from e2e.vllm import DOCKERFILE

MAKEFILE = (REPOSITORY / "Makefile").read_text()
DOCKERFILES = {name: image.dockerfile for name, image in IMAGES.items()} | {"vllm": DOCKERFILE}


def recipe(target: str) -> list[str]:
    """Return the commands of a target. Its prerequisites come first, as `make <prerequisite>`."""
    found = re.search(rf"^{target}:([^#\n]*)[^\n]*\n((?:\t.*\n)*)", MAKEFILE, re.MULTILINE)
    assert found
    return [*(f"make {name}" for name in found[1].split()), *found[2].replace("\t", "").splitlines()]


def test_every_target_has_a_line_of_help() -> None:
    phony = re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    assert phony
    shown = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=REPOSITORY, check=True, capture_output=True, text=True
    ).stdout
    assert {line.split()[0] for line in shown.splitlines() if len(line.split()) > 1} == set(phony[1].split())


def test_the_nightly_target_runs_what_ci_leaves_out() -> None:
    output = subprocess.run(
        ["make", "-n", "nightly"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout
    chosen = [marks.split(" and not")[0].strip() for marks in re.findall(r"-m '([^']*)'", output)]
    assert chosen[:5] == ["slow", "nightly", "not slow", "slow", "nightly"], "the tests; all with the oldest"
    assert chosen[5:] == ["not alone", "alone"]


def test_pre_commit_runs_what_make_check_runs() -> None:
    hooks = yaml.safe_load((REPOSITORY / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    commands = [command for command in recipe("check") if command != "make venv"]
    for hook in hooks:
        assert [command for command in commands if command.startswith(hook["entry"])], hook
    for command in commands:
        assert [hook for hook in hooks if command.startswith(hook["entry"])], command


@pytest.mark.parametrize(
    ("page", "words"),
    [
        (
            "configuration",
            ("CONVEYOR_OPERATOR_WORKERS", "--max-held-bytes", "CONVEYOR_METRICS_HTTPS_PORT", "--max-num-seqs"),
        ),
        (
            "errors",
            ("| 429 | `rate_limit_error` | `queue_full` |", "`context_length_exceeded`", "`ServiceUnavailable`"),
        ),
        (
            "openai-fields",
            ("### Chat, completions, responses, messages", "| `temperature` |", "`user`", "`logit_bias`"),
        ),
        ("cli", ("### kubectl conveyor explain", "`--replica`", "conveyor_engine fetch", "`--uri URI` (required)")),
        ("chart", ("| `gateway.replicas` | `2` |", "| `engine.image.tag` |", "| `metrics.enabled` | `true` |")),
    ],
)
def test_a_generated_page_is_what_the_programs_say(page: str, words: tuple[str, ...]) -> None:
    program = REPOSITORY / "docs" / f"{page.replace('-', '_')}.py"
    done = subprocess.run([sys.executable, program], check=True, capture_output=True, text=True)
    assert done.stdout == (REPOSITORY / "docs" / f"{page}.md").read_text()
    for word in words:
        assert word in done.stdout


def test_engine_and_gateway_report_the_version_that_is_released() -> None:
    released = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
    assert released == conveyor_engine.__version__ == conveyor_gateway.__version__


def installed(dockerfile: Path) -> set[str]:
    """Return each package in uv.lock that the extras of a Dockerfile install on any platform."""
    lock: dict[str, list[dict[str, Any]]] = {}
    for package in tomllib.loads((REPOSITORY / "uv.lock").read_text())["package"]:
        lock.setdefault(package["name"], []).append(package)
    found: set[tuple[str, str]] = set()
    todo = [("conveyor", ""), *(("conveyor", extra) for extra in re.findall(r"--extra (\w+)", dockerfile.read_text()))]
    while todo:
        if (target := todo.pop()) in found:
            continue
        found.add(target)
        name, extra = target
        for package in lock[name]:
            needed = (
                package.get("optional-dependencies", {}).get(extra, []) if extra else package.get("dependencies", [])
            )
            todo += [(item["name"], each) for item in needed for each in ("", *item.get("extra", ()))]
    return {name for name, _ in found}


def test_the_control_image_has_no_torch() -> None:
    heavy = {"torch", "transformers", "triton"}
    assert installed(DOCKERFILES["control"]) & heavy == set()
    assert installed(DOCKERFILES["control"]) >= {"kopf", "aiohttp", "pydantic-core"}
    assert installed(DOCKERFILES["engine"]) >= heavy


def test_all_images_have_the_same_base() -> None:
    bases = [re.findall(r"^ARG BASE=(.*)$", file.read_text(), re.MULTILINE) for file in DOCKERFILES.values()]
    assert len(bases) > 1
    assert all(base == bases[0] for base in bases)


@pytest.mark.parametrize("image", DOCKERFILES)
def test_an_image_takes_its_base_as_an_argument_and_runs_as_a_numbered_user(image: str) -> None:
    lines = [line for line in DOCKERFILES[image].read_text().splitlines() if line and line[0] not in "# "]
    assert re.fullmatch(r"ARG BASE=[a-z0-9.:/-]+:[\w.-]+@sha256:[0-9a-f]{64}", lines[0]), "a tag alone may change"
    stages = {line.split(" AS ")[1] for line in lines if " AS " in line}
    bases = {line.split()[1] for line in lines if line.startswith("FROM")}
    assert bases - stages == {"${BASE}"}
    *_, user = [line for line in lines if line.startswith(("FROM", "USER"))]
    assert re.fullmatch(r"USER [1-9]\d*:[1-9]\d*", user)


@pytest.mark.parametrize("turn", ["first", "second"])
def test_a_tests_handler_of_a_signal_is_gone_before_the_next_one(turn: str) -> None:
    assert signal.getsignal(signal.SIGTERM) is not leave
    signal.signal(signal.SIGTERM, leave)


def leave(*_: object) -> None:
    """A handler."""


def test_no_file_has_the_marks_of_a_conflict() -> None:
    """Linters read only code, but pages may have such marks too."""
    marks = ["-e", "^" + 7 * "<" + " ", "-e", "^" + 7 * ">" + " "]
    found = subprocess.run(["git", "grep", "-nI", *marks], cwd=REPOSITORY, capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (1, "")
