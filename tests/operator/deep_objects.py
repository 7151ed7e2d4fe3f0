"""Creates objects whose managedFields are nested so deeply that Python's JSON library cannot read them."""

import subprocess
from pathlib import Path

from conveyor_api import names
from e2e.cluster.tools import binary


def deep_object(api_version: str, kind: str, rest: str = "") -> str:
    """Build an object that any user may write, because the API server does not check managedFields with a schema."""
    fields = '{"f:a":' * 3000 + "{}" + "}" * 3000
    entry = f'{{"manager":"m","operation":"Update","apiVersion":"{api_version}","fieldsType":"FieldsV1","fieldsV1":'
    metadata = (
        f'"name":"deep","labels":{{"{names.INFERENCE_SERVICE_LABEL}":"qwen"}},"managedFields":[{entry}{fields}}}]'
    )
    return f'{{"apiVersion":"{api_version}","kind":"{kind}","metadata":{{{metadata}}}{rest}}}'


DEEP = {
    "InferenceService": deep_object(names.API_VERSION, names.KIND, ',"spec":{"model":{"uri":"pvc://models/demo"}}'),
    "ConfigMap": deep_object("v1", "ConfigMap"),
    "ServiceAccount": deep_object("v1", "ServiceAccount"),
}


def create_deep(namespace: str, kubeconfig: Path, tmp_path: Path) -> None:
    """Create the object with kubectl, because Python's JSON library cannot handle it."""
    for kind, text in DEEP.items():
        manifest = tmp_path / f"{kind}.json"
        manifest.write_text(text)
        command = [binary("kubectl"), f"--kubeconfig={kubeconfig}", f"--namespace={namespace}"]
        subprocess.run([*command, "create", "--validate=false", f"--filename={manifest}"], check=True)
