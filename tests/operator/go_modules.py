"""Definitions of other projects' kinds, out of their Go modules, which are fetched into the cache once."""

import json
import os
import subprocess
from pathlib import Path

import yaml
from tests.operator.stage import wait_until

from e2e.cluster.api import Api
from e2e.cluster.paths import CACHE


def install_kind(api: Api, module: str, definition: str) -> None:
    """`definition`: the path of a CustomResourceDefinition in the module, which is `path@version`."""
    environment = os.environ | {"GOMODCACHE": str(CACHE / "go-modules"), "GOFLAGS": "-modcacherw"}
    done = subprocess.run(["go", "mod", "download", "-json", module], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    crd = yaml.safe_load(Path(json.loads(done.stdout)["Dir"], definition).read_text())
    api.apply(f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{crd['metadata']['name']}", crd)
    group, kind = crd["spec"]["group"], crd["spec"]["names"]["plural"]
    versions = [version["name"] for version in crd["spec"]["versions"] if version["served"]]
    wait_until(kind, lambda: all(api.reachable(f"/apis/{group}/{version}/{kind}") for version in versions), 30)
