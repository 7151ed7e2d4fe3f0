"""Tests that each extra installs exactly the packages that its part imports."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from e2e.cluster.paths import REPOSITORY

BELOW_ALL = ("lib/conveyor_process", "lib/conveyor_protocol")
TOKENS = "lib/conveyor_tokens"
SHARED = (*BELOW_ALL, "lib/conveyor_api", "lib/conveyor_http", "lib/conveyor_kube")
PARTS = {
    "operator": (*SHARED, "operator"),
    "gateway": (*SHARED, TOKENS, "gateway", "metrics", "jobs"),
    "console": (*SHARED, "cli/conveyor_insight", "console"),
    "cli": (*SHARED, "cli/conveyor_load", "cli/conveyor_insight", "cli/conveyor_kubectl"),
    "engine": (*BELOW_ALL, TOKENS, "engine/conveyor_engine"),
}
# Imported by the HTTP protocol of uvicorn (httptools), and by conveyor_process.event_loop if it is installed (uvloop).
ASKED_FOR = {"engine": {"httptools", "uvloop"}, "gateway": {"uvloop"}}
BENCH = ("bench/conveyor_bench",)
OURS = {"e2e", "tests"}
# Installed beside the project for one measurement each: scipy, which some bring, makes transformers start slower.
PEERS = {
    "bentoml", "ctranslate2", "gguf", "infinity_emb", "litserve", "llama_cpp", "pytriton", "ray",
    "sentence_transformers", "vllm",
}  # fmt: skip
# Imported by conveyor_process.otlp alone, if the environment names a collector. Several packages share the first name.
TRACES = {"opentelemetry", "requests"}
# A half of another package, in the one version that goes with it.
HALVES = {"pydantic-core": "pydantic"}


def find_imports(file: Path) -> Iterator[str]:
    """Return the top-level names of all imports in a file, including those inside functions."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def find_packages(folders: Iterable[str]) -> set[str]:
    """Return the packages from the registry that the files in these folders import."""
    names = {name for folder in folders for file in (REPOSITORY / folder).rglob("*.py") for name in find_imports(file)}
    packages = packages_distributions()
    ours = {name for name in names if name.startswith("conveyor_")} | OURS
    foreign = names - sys.stdlib_module_names - PEERS - ours - TRACES
    found = {packages[name][0].lower().replace("_", "-") for name in foreign}
    return {HALVES.get(package, package) for package in found}


def read_names(requirements: list[str]) -> set[str]:
    return {re.split(r"[^\w.-]", requirement, maxsplit=1)[0] for requirement in requirements}


PYPROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
ALWAYS = read_names(PROJECT["dependencies"])


@pytest.mark.parametrize("part", PARTS)
def test_an_extra_is_what_its_part_imports(part: str) -> None:
    declared = read_names(PROJECT["optional-dependencies"][part])
    assert declared == find_packages(PARTS[part]) - ALWAYS | ASKED_FOR.get(part, set())


def test_the_extra_traces_has_what_one_module_imports_and_no_other_module_does() -> None:
    importing = [file for file in (REPOSITORY / "lib").rglob("*.py") if TRACES & set(find_imports(file))]
    assert [file.name for file in importing] == ["otlp.py"]
    text = importing[0].read_text()
    declared = read_names(PROJECT["optional-dependencies"]["traces"])
    assert declared == {
        "opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http", "opentelemetry-proto", "requests",
    }  # fmt: skip
    for name in ("opentelemetry.sdk.", "opentelemetry.exporter.otlp.proto.http.", "opentelemetry.proto."):
        assert f"from {name}" in text


def test_the_extra_local_has_the_other_extras_that_conveyor_run_needs() -> None:
    (extras,) = PROJECT["optional-dependencies"]["local"]
    needed = ("cli", "gateway", "engine")
    assert re.findall(r"\w+", extras.partition("[")[2]) == sorted(needed)
    offered = read_names([each for extra in needed for each in PROJECT["optional-dependencies"][extra]])
    assert find_packages(["cli/conveyor_local"]) <= offered | ALWAYS


def test_what_is_always_installed_is_imported_by_every_part() -> None:
    assert all(find_packages(folders) >= ALWAYS for folders in PARTS.values())


def test_the_group_bench_is_what_measurements_import_beside_all_extras() -> None:
    extras = {name for extra in PROJECT["optional-dependencies"].values() for name in read_names(extra)}
    assert read_names(PYPROJECT["dependency-groups"]["bench"]) == find_packages(BENCH) - ALWAYS - extras
