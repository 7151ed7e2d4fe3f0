"""Builds the volume and the mount of the Secret from which a fetch reads its credentials. Pure.

Secrets are files and not environment variables, because admission policies of some clusters forbid the latter. The
volume is optional: without the Secret, the fetch starts and reports this. Otherwise only an Event would say it, and the
operator does not read the Events of pods.
"""

from conveyor_api import names
from conveyor_api.adapters import Adapter
from conveyor_api.model import BucketModel, Model, SecretRef
from conveyor_api.spec import InferenceServiceSpec
from conveyor_operator.loop.owner import Object


def build_credentials_volume(spec: InferenceServiceSpec, fetched: Model | Adapter, container: str) -> list[Object]:
    """Return the volume for a fetch container; none without a Secret.

    Each file has the name of a variable. Variables in `pod.env` replace optional keys.
    """
    reference = fetched.secret_ref
    if reference is None:
        return []
    taken = {variable.name for variable in spec.pod.env}
    paths = {reference.key or names.HUB_TOKEN_KEY: names.HUB_TOKEN_ENV}
    if isinstance(fetched.source, BucketModel):
        optional = (name for name in names.BUCKET_OPTIONAL_KEYS if name not in taken)
        paths = {name: name for name in (*names.BUCKET_KEYS, *optional)}
    items = [{"key": key, "path": path} for key, path in paths.items()]
    secret = {"secretName": reference.name, "items": items, "optional": True}
    return [{"name": _volume_name(container), "secret": secret}]


def build_credentials_mount(fetched: Model | Adapter, container: str) -> list[Object]:
    reference = fetched.secret_ref
    if reference is None:
        return []
    return [{"name": _volume_name(container), "mountPath": _find_path(reference), "readOnly": True}]


def build_credentials_arguments(fetched: Model | Adapter) -> list[str]:
    reference = fetched.secret_ref
    return [] if reference is None else ["--credentials", _find_path(reference)]


def _find_path(reference: SecretRef) -> str:
    """Return the folder of the Secret. The fetch reads the Secret's name from it, for its messages."""
    return f"{names.CREDENTIALS_PATH}/{reference.name}"


def _volume_name(container: str) -> str:
    return f"{names.CREDENTIALS_VOLUME}-{container}"
