"""Tests that a tool which compares a service with its file finds no difference after a reconcile."""

import json
from pathlib import Path

import pytest
from tests.kubectl import kubectl
from tests.operator.stage import Stage, make_service


@pytest.mark.parametrize("flags", [(), ("--server-side",)], ids=["client side", "server side"])
def test_kubectl_diff_is_empty_after_a_reconcile(
    stage: Stage, kubeconfig: Path, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    file = tmp_path / "service.json"
    file.write_text(json.dumps(make_service()))
    kubectl(kubeconfig, stage.space.namespace, "apply", *flags, f"--filename={file}")
    with stage.operator():
        stage.space.wait_children("qwen")
        assert stage.space.wait_observed("qwen")["metadata"]["generation"] == 1
    assert kubectl(kubeconfig, stage.space.namespace, "diff", *flags, f"--filename={file}") == ""
