"""The files by which a program in a pod reaches the API server, for tests that replace the cluster's authority."""

import json
from pathlib import Path

from e2e.cluster.api import Api
from e2e.cluster.control_plane import ControlPlane


class Pod:
    """The files that the kubelet gives a pod. `kubeconfig` refers to them."""

    def __init__(self, folder: Path, plane: ControlPlane) -> None:
        self._plane, self._file = plane, folder / "ca.crt"
        self.write_authority()
        api = Api(plane.kubeconfig)
        role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"}
        subjects = [{"kind": "ServiceAccount", "name": "default", "namespace": "default"}]
        bindings = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings"
        api.create(bindings, {"metadata": {"name": "pod"}, "roleRef": role, "subjects": subjects})
        answer = api.create("/api/v1/namespaces/default/serviceaccounts/default/token", {"spec": {}})
        cluster = {"server": plane.server, "certificate-authority": str(self._file)}
        content = {
            "current-context": "pod",
            "contexts": [{"name": "pod", "context": {"cluster": "pod", "user": "pod"}}],
            "users": [{"name": "pod", "user": {"token": answer["status"]["token"]}}],
            "clusters": [{"name": "pod", "cluster": cluster}],
        }
        self.kubeconfig = folder / "kubeconfig"
        self.kubeconfig.write_text(json.dumps(content))

    def write_authority(self) -> None:
        self._file.write_bytes(self._plane.authority.certificate.read_bytes())
