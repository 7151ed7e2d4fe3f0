"""Runs the real kubectl with the tests' control plane."""

import subprocess
from pathlib import Path

from e2e.cluster.tools import binary


def kubectl(kubeconfig: Path, namespace: str, *arguments: str) -> str:
    command = [str(binary("kubectl")), "--kubeconfig", str(kubeconfig), "--namespace", namespace, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
