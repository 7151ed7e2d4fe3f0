"""The offline job of docs/jobs.md runs to its end beside its service, and ends the run."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cli.local.running import Running, build_service

from conveyor_local.errors import RunError
from conveyor_local.files import Objects
from conveyor_local.machine import Machine
from conveyor_local.offline import OfflineJob
from conveyor_local.places import open_places
from conveyor_local.plans import Surroundings
from e2e.cluster.paths import REPOSITORY

PAGE = (REPOSITORY / "docs/jobs.md").read_text()


def read_job() -> dict[str, Any]:
    """Return the job of the page, with the name of an image."""
    (text,) = re.findall(r"^(apiVersion: batch/v1\n.*?)^EOF$", PAGE, re.DOTALL | re.MULTILINE)
    job: dict[str, Any] = yaml.safe_load(text.replace("$IMAGE", "image"))
    return job


def build_requests(*lines: dict[str, Any]) -> dict[str, Any]:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    metadata = {"name": "requests", "namespace": "team-b"}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"requests.jsonl": text}}


def test_the_page_s_job_writes_its_results_and_ends_the_run(tmp_path: Path, models: Path) -> None:
    service = build_service()
    service["metadata"]["namespace"] = "team-b"
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    requests = build_requests(
        {"custom_id": "good", "url": "/v1/chat/completions", "body": body},
        {"custom_id": "bad", "url": "/v1/chat/completions", "body": {**body, "temperature": -1}},
    )
    results = tmp_path / "results"
    results.mkdir()
    flags = ("--volume", f"results={results}", "--until-done")
    with Running(tmp_path / "run", models, service, requests, read_job(), flags=flags) as running:
        assert running.wait_ended() == 0, running.output
        assert "Job team-b/nightly: ended with exit code 0" in running.output
    for file, name in (("output.jsonl", "good"), ("errors.jsonl", "bad")):
        (line,) = (results / "nightly" / file).read_text().splitlines()
        assert json.loads(line)["custom_id"] == name


def test_a_job_without_its_folder_is_refused_by_name(tmp_path: Path) -> None:
    places = open_places(tmp_path / "cache", {})
    objects = Objects(config_maps={"team-b/requests": build_requests()})
    with pytest.raises(RunError, match=r"Job team-b/nightly: the claim results .*--volume results=DIR"):
        OfflineJob("team-b/nightly", read_job(), Surroundings(places, objects, Machine(1, 1), {}))
    places.lock.close()
