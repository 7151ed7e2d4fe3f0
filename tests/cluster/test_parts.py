"""Tests the parts of the cluster, each with a real API server or a real process."""

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from e2e.cluster import gpus, provisioner, sysctls
from e2e.cluster.api import Api, wait_until
from e2e.cluster.control_plane import ControlPlane
from e2e.cluster.paths import REPOSITORY
from e2e.cluster.processes import Processes
from e2e.cluster.volumes import host_path_claim


def test_labelled_nodes_get_gpus_and_others_do_not(control_plane: ControlPlane) -> None:
    api = Api(control_plane.kubeconfig)
    status = {"capacity": {"cpu": "1"}, "allocatable": {"cpu": "1"}}  # as a kubelet first reports it
    for name, labels in (("with-gpus", {gpus.LABEL: "true"}), ("without-gpus", {})):
        api.create("/api/v1/nodes", {"metadata": {"name": name, "labels": labels}, "status": status})
    gpus.fake(control_plane.kubeconfig)
    statuses = [api.get(f"/api/v1/nodes/{name}")["status"] for name in ("with-gpus", "without-gpus")]
    assert [status.get("allocatable", {}).get(gpus.RESOURCE) for status in statuses] == [str(gpus.COUNT), None]


def test_a_host_path_claim_is_bound_without_a_storage_class(control_plane: ControlPlane, namespace: str) -> None:
    api = Api(control_plane.kubeconfig)
    volume, claim = host_path_claim(namespace, "models", "/nowhere")
    api.create("/api/v1/persistentvolumes", volume)
    path = f"/api/v1/namespaces/{namespace}/persistentvolumeclaims"
    api.create(path, claim)
    wait_until("the claim", lambda: api.get(f"{path}/models")["status"].get("phase") == "Bound")


def test_a_claim_of_the_default_class_gets_a_folder_that_is_deleted_with_it(
    control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    """A claim that somebody has bound by hand gets no second volume.

    Kubernetes also gives the class to claims without one that other tests have left, so they may get folders too.
    """
    api, folder = Api(control_plane.kubeconfig), tmp_path / "volumes"
    path = f"/api/v1/namespaces/{namespace}/persistentvolumeclaims"
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    by_hand = host_path_claim(namespace, "by-hand", "/nowhere")[0]
    by_hand["spec"]["storageClassName"] = provisioner.CLASS
    api.create("/api/v1/persistentvolumes", by_hand)
    processes = Processes(tmp_path, die_with_parent=True)
    command = ("python", "-m", "e2e.cluster.provisioner", control_plane.kubeconfig, folder)
    processes.start("provisioner", command, {"PYTHONPATH": str(REPOSITORY)})
    try:
        storage_class = f"/apis/storage.k8s.io/v1/storageclasses/{provisioner.CLASS}"
        wait_until("the class", lambda: api.reachable(storage_class), processes.check)
        for name in ("models", "by-hand"):
            api.create(path, {"metadata": {"name": name}, "spec": spec})  # without a class, as the pages do
        for name in ("models", "by-hand"):
            claim = f"{path}/{name}"
            wait_until(name, lambda at=claim: api.get(at)["status"].get("phase") == "Bound", processes.check)  # type: ignore[misc]
        assert api.get(f"{path}/by-hand")["spec"]["volumeName"] == f"{namespace}-by-hand"
        volume = api.get(f"{path}/models")["spec"]["volumeName"]
        assert (folder / volume).stat().st_mode & 0o777 == 0o777
        claimed = [each["spec"].get("claimRef", {}) for each in api.get("/api/v1/persistentvolumes")["items"]]
        assert [each["name"] for each in claimed if each.get("namespace") == namespace].count("by-hand") == 1
        (folder / volume / "file").touch()
        api.delete(f"{path}/models")
        wait_until("the volume's end", lambda: not api.reachable(f"/api/v1/persistentvolumes/{volume}"))
        assert not (folder / volume).exists()
    finally:
        processes.stop()
        api.delete(storage_class)
        api.delete(f"{path}/by-hand")
        api.delete(f"/api/v1/persistentvolumes/{namespace}-by-hand")


def test_a_process_that_got_the_id_of_a_recorded_one_is_left_alone(tmp_path: Path) -> None:
    processes = Processes(tmp_path, die_with_parent=True)
    processes.start("sleeper", ["python", "-c", "import time; time.sleep(60)"])
    sleeper = processes.recorded()[0]
    assert not replace(sleeper, started_ticks=sleeper.started_ticks + 1).alive()
    processes.stop()
    assert not sleeper.alive()
    assert processes.recorded() == []


def test_kernel_settings_are_put_back_except_what_somebody_else_has_set_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysctls, "_TREE", tmp_path)
    monkeypatch.setattr(sysctls, "_OURS", {"changed": "1", "same": "1", "changed-again": "1"})
    write_all(tmp_path, {"changed": "0", "same": "1", "changed-again": "0"})
    sysctls.note(tmp_path)
    write_all(tmp_path, {"changed": "1", "same": "1", "changed-again": "7"})
    sysctls.restore(tmp_path)
    assert [(tmp_path / name).read_text() for name in ("changed", "same", "changed-again")] == ["0", "1", "7"]


def write_all(folder: Path, texts: dict[str, str]) -> None:
    for name, text in texts.items():
        (folder / name).write_text(text)


@pytest.mark.skipif(
    not all(map(shutil.which, ("nft", "iptables")))
    or subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode != 0,
    reason="needs nftables, iptables and a network namespace of its own, so root",
)
@pytest.mark.parametrize(
    ("firewall", "ways_past_it"),
    [("true", []), ("iptables -P FORWARD DROP", ["-d 10.188.0.0/16", "-s 10.188.0.0/16"])],
    ids=["no firewall", "one that drops what it does not know"],
)
def test_what_is_left_of_a_network_is_named_until_it_is_deleted(firewall: str, ways_past_it: list[str]) -> None:
    code = (
        "from e2e.cluster import network as n\n"
        "n._CNI_RESULTS = n.Path('/none')\n"  # namespaces do not separate files, so these may be a running cluster's
        "def rules(): return n._output('nft', 'list', 'ruleset')\n"
        "before, first = rules(), n.left(); n.create()\n"
        "n._run('ip', 'link', 'add', 'veth1', 'type', 'veth', 'peer', 'veth2')\n"  # as a killed pod's
        "n._run('ip', 'link', 'set', 'veth1', 'up'); n._run('ip', 'route', 'add', '10.188.0.5', 'dev', 'veth1')\n"
        "there = n.left(); n.delete()\n"
        "print([first, there, n.left(), rules() == before])"
    )
    # sysfs shows the interfaces of the namespace in which it was mounted.
    alone = ["unshare", "--net", "--mount", "sh", "-c", f'mount -t sysfs sysfs /sys && {firewall} && exec "$@"', "sh"]
    finished = subprocess.run([*alone, sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    there = ["network interface conveyor0", "nft table ip conveyor"]
    there += [f"iptables rule -A FORWARD {way} -j ACCEPT" for way in ways_past_it]
    there += ["route 10.188.0.5 dev veth1 scope link linkdown"]
    assert finished.stdout == f"{[[], there, [], True]}\n", finished.stderr
