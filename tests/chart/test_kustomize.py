"""Tests that Kustomize, as kubectl brings it, renders the chart and patches what it rendered."""

import shutil
import subprocess
from pathlib import Path

import yaml
from tests.chart.installation import CHART, RELEASE, Json, render

from conveyor_api.names import SYSTEM_NAMESPACE
from e2e.cluster.tools import binary

PATCH = "- {op: add, path: /spec/template/spec/hostUsers, value: false}"
KUSTOMIZATION = {
    "helmGlobals": {"chartHome": "charts"},  # Kustomize reads no files outside of its folder
    "helmCharts": [{"name": CHART.name, "releaseName": RELEASE, "namespace": SYSTEM_NAMESPACE, "skipHooks": True}],
    "patches": [{"target": {"kind": "Deployment", "name": "conveyor-gateway"}, "patch": PATCH}],
}


def test_kustomize_renders_what_helm_renders_and_patches_it(tmp_path: Path) -> None:
    shutil.copytree(CHART, tmp_path / "charts" / CHART.name)
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(KUSTOMIZATION))
    command = [binary("kubectl"), "kustomize", "--enable-helm", f"--helm-command={binary('helm')}", tmp_path]
    built = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    expected = {key(item): item for item in render() if "helm.sh/hook" not in item["metadata"].get("annotations", {})}
    expected["Deployment", "conveyor-gateway"]["spec"]["template"]["spec"]["hostUsers"] = False
    assert {key(item): item for item in yaml.safe_load_all(built)} == expected


def key(item: Json) -> tuple[str, str]:
    return item["kind"], item["metadata"]["name"]
