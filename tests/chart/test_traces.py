"""Tests that the chart's value `traces` reaches gateways, operator and engines, as OpenTelemetry's variables."""

from pathlib import Path
from typing import Any

import yaml
from tests.chart.installation import find, render_json

from conveyor_operator.inferenceservice.profiles import read_profiles
from e2e.cluster.paths import REPOSITORY

Json = dict[str, Any]
ENDPOINT = "http://otel-collector.observability:4318"
ENGINE_ENV = {"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": ENDPOINT}


def find_env(objects: list[Json], program: str) -> dict[str, str]:
    (container,) = find(objects, "Deployment", f"conveyor-{program}")["spec"]["template"]["spec"]["containers"]
    return {each["name"]: each["value"] for each in container.get("env", []) if each["name"].startswith("OTEL_")}


def fill(objects: list[Json], folder: Path, spec: Json) -> Json:
    """Return the spec of a service with the chart's profiles."""
    file = folder / "profiles.yaml"
    file.write_text(find(objects, "ConfigMap", "conveyor-profiles")["data"]["profiles.yaml"])
    filled, _ = read_profiles(file).fill({"spec": spec})
    found: Json = filled["spec"]
    return found


def test_the_page_s_values_reach_all_programs(tmp_path: Path) -> None:
    page = (REPOSITORY / "docs/traces.md").read_text()
    objects = render_json(**yaml.safe_load(page.partition("```yaml\n")[2].partition("```")[0]))
    expected = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": ENDPOINT,
        "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": "0.1",
    }
    assert find_env(objects, "gateway") == find_env(objects, "operator") == expected
    assert find_env(objects, "metrics") == {}
    assert fill(objects, tmp_path, {}) == {"pod": {"env": [ENGINE_ENV]}}


def test_without_an_endpoint_nothing_is_set() -> None:
    objects = render_json()
    assert [find_env(objects, program) for program in ("gateway", "operator", "metrics")] == [{}, {}, {}]
    assert "conveyor-profiles" not in {each["metadata"]["name"] for each in objects}


def test_profiles_and_services_keep_what_they_have(tmp_path: Path) -> None:
    proxy, gpu = {"name": "HTTPS_PROXY", "value": "http://proxy:3128"}, {"nodeSelector": {"gpu": "l4"}}
    profiles = {"default": {"pod": {"env": [proxy], **gpu}}, "l4": {"resources": {"limits": {"cpu": 2}}}}
    objects = render_json(traces={"endpoint": ENDPOINT}, profiles=profiles)
    assert fill(objects, tmp_path, {"profile": "l4"}) == {
        "profile": "l4", "pod": {"env": [ENGINE_ENV, proxy], **gpu}, "resources": {"limits": {"cpu": 2}},
    }  # fmt: skip
    own = {"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": "http://own:4318"}
    filled = fill(objects, tmp_path, {"pod": {"env": [own]}})
    assert {each["name"]: each["value"] for each in filled["pod"]["env"]}["OTEL_EXPORTER_OTLP_ENDPOINT"] == own["value"]


def test_an_own_collector_of_the_default_profile_is_kept(tmp_path: Path) -> None:
    own = [{"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": "http://own:4318"}]
    objects = render_json(traces={"endpoint": ENDPOINT}, profiles={"default": {"pod": {"env": own}}})
    assert fill(objects, tmp_path, {}) == {"pod": {"env": own}}


def test_own_variables_of_a_program_replace_the_chart_s() -> None:
    own = {"name": "OTEL_TRACES_SAMPLER", "value": "x"}
    objects = render_json(traces={"endpoint": ENDPOINT}, gateway={"env": [own]})
    (container,) = find(objects, "Deployment", "conveyor-gateway")["spec"]["template"]["spec"]["containers"]
    assert [each for each in container["env"] if each["name"] == own["name"]] == [own]


def test_an_upgrade_with_the_values_of_a_release_without_traces_renders() -> None:
    assert render_json(traces=None, console=None) == render_json()
