"""`spec.model`: the model to serve, its source, and its cache.

`parse_model_uri` parses `model.uri`. From its result the operator builds the pods, which mount or download the model.
The operator also writes the model's folder into the engine's configuration. No I/O.
"""

import re
from dataclasses import dataclass
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from conveyor_api import names
from conveyor_api.base import ApiModel, Rule
from conveyor_api.quantities import Quantity, parse_quantity

HUB_SCHEME: Final = "hf://"
BUCKET_SCHEME: Final = "s3://"
VOLUME_SCHEME: Final = "pvc://"
IMAGE_SCHEME: Final = "oci://"
DEFAULT_REVISION: Final = "main"

_SCHEMES: Final = (HUB_SCHEME, BUCKET_SCHEME, VOLUME_SCHEME, IMAGE_SCHEME)

_SEGMENT = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}"
_REVISION = r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}"
_CLAIM = r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?"
_FILE = "[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
_HUB_PATTERN: Final = f"^hf://{_SEGMENT}/{_SEGMENT}(@{_REVISION})?(:{_FILE})?$"
_PATH = "(/[A-Za-z0-9_@+=.-]+)+"
_BUCKET_PATTERN: Final = f"^s3://[a-z0-9][a-z0-9.-]{{1,61}}[a-z0-9]{_PATH}$"
_VOLUME_PATTERN: Final = f"^pvc://{_CLAIM}{_PATH}$"
_REGISTRY = "[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?(:[0-9]{1,5})?"
_REPOSITORY = "(/[a-z0-9]+([._-]+[a-z0-9]+)*)+"
_VERSION = "(:[A-Za-z0-9_][A-Za-z0-9._-]{0,127})?(@sha256:[0-9a-f]{64})?"
_IMAGE_PATTERN: Final = f"^oci://{_REGISTRY}{_REPOSITORY}{_VERSION}(/{_PATH})?$"
DOWNLOAD_OR_CLAIM_PATTERN: Final = "|".join((_HUB_PATTERN, _BUCKET_PATTERN, _VOLUME_PATTERN))
_BUCKET_OR_CLAIM: Final = "^(s3|pvc)://"
CLIMBS: Final = "/[.]{1,2}(/|$)|^hf.*[.][.]"
_SHAPES: Final = (
    "hf://organisation/name[@revision][:file], nor s3://bucket/prefix, nor pvc://claim/path, "
    "nor oci://registry/repository[:tag][@digest][//path]"
)
_SERVED_NAME_PATTERN: Final = r"^[A-Za-z0-9]([A-Za-z0-9._/:@-]{0,126}[A-Za-z0-9])?$"

_OWN_CLAIM_BEFORE_AND_AFTER: Final = (
    "self.strategy == 'PVC' && has(self.size) && oldSelf.strategy == 'PVC' && has(oldSelf.size)"
)


@dataclass(frozen=True, slots=True)
class HubModel:
    """`hf://organisation/name[@revision][:file]`: a repository of the Hugging Face hub."""

    repository: str  # organisation/name
    revision: str  # branch, tag or commit; "main" if the uri names none
    file: str = ""  # a GGUF file's name, or its end as in Q4_K_M

    @property
    def directory(self) -> str:
        """Return the folder of the downloaded model in the engine's pod, one for each repository, revision and file."""
        file = f"~{self.file}" if self.file else ""
        return f"{names.HUB_MODELS_PATH}/{self.repository}/{self.revision.replace('/', '--')}{file}"


@dataclass(frozen=True, slots=True)
class BucketModel:
    """`s3://bucket/prefix`: a folder of a bucket."""

    bucket: str
    prefix: str  # without slashes at its ends

    @property
    def directory(self) -> str:
        """Return the folder of the downloaded model in the engine's pod. It is never inside the folder of another
        prefix."""
        return f"{names.BUCKET_MODELS_PATH}/{self.bucket}/{self.prefix}/~model"


@dataclass(frozen=True, slots=True)
class VolumeModel:
    """`pvc://claim/path`: a folder of a PersistentVolumeClaim in the service's namespace, mounted read-only."""

    claim_name: str
    path: str  # inside the volume, without a leading slash

    @property
    def directory(self) -> str:
        """Return the model's folder in the engine's pod."""
        return f"{names.VOLUME_MODELS_PATH}/{self.path}"


@dataclass(frozen=True, slots=True)
class ImageModel:
    """`oci://reference[//path]`: a folder of an image, which the node pulls and mounts read-only."""

    reference: str  # registry/repository[:tag][@digest]
    path: str  # inside the image, without a leading slash; empty: the whole image

    @property
    def directory(self) -> str:
        """Return the model's folder in the engine's pod."""
        return f"{names.IMAGE_MODELS_PATH}/{self.path}".rstrip("/")


ModelSource = HubModel | BucketModel | VolumeModel | ImageModel
Mounted = VolumeModel | ImageModel
"""Sources that Kubernetes mounts read-only. No container downloads them."""


def parse_model_uri(uri: str) -> ModelSource:
    """Parse a valid `model.uri`. Raises ValueError if it has none of the known forms."""
    if ".." not in uri and re.fullmatch(_HUB_PATTERN, uri):
        address, _, file = uri.removeprefix(HUB_SCHEME).partition(":")
        repository, _, revision = address.partition("@")
        return HubModel(repository, revision or DEFAULT_REVISION, file)
    if not _has_dot_segment(uri) and re.fullmatch(_BUCKET_PATTERN, uri):
        bucket, _, prefix = uri.removeprefix(BUCKET_SCHEME).partition("/")
        return BucketModel(bucket, prefix)
    if not _has_dot_segment(uri) and re.fullmatch(_VOLUME_PATTERN, uri):
        claim_name, _, path = uri.removeprefix(VOLUME_SCHEME).partition("/")
        return VolumeModel(claim_name, path)
    if not _has_dot_segment(uri) and re.fullmatch(_IMAGE_PATTERN, uri):
        reference, _, path = uri.removeprefix(IMAGE_SCHEME).partition("//")
        return ImageModel(reference, path)
    raise ValueError(f"{uri!r} is neither {_SHAPES}")


def _has_dot_segment(uri: str) -> bool:
    return any(segment in (".", "..") for segment in uri.split("/"))


def is_valid_uri(uri: str, pattern: str) -> bool:
    """Return whether the uri matches the pattern, and no path in it leads out of its folder."""
    return re.fullmatch(pattern, uri) is not None and not re.search(CLIMBS, uri)


class SecretRef(ApiModel):
    """A Secret in the service's namespace that has the credentials."""

    name: Annotated[str, Field(min_length=1, max_length=253)]
    """Name of the Secret."""
    key: Annotated[str, Field(min_length=1, max_length=253)] | None = None
    """`hf://`: key whose value is the token; default `token`."""


class Cache(ApiModel):
    """The cache of downloaded models."""

    rules: ClassVar = (
        Rule(
            "self.strategy != 'PVC' || has(self.claimName) != has(self.size)",
            "strategy PVC needs exactly one of claimName (use that claim) and size (create a claim of that size)",
            lambda cache: cache.strategy != "PVC" or (cache.claim_name is None) != (cache.size is None),
        ),
        Rule(
            "self.strategy == 'PVC' || !has(self.claimName)",
            "claimName is only for strategy PVC; set strategy: PVC or remove claimName",
            lambda cache: cache.strategy == "PVC" or cache.claim_name is None,
            field="claimName",
        ),
        Rule(
            "!has(self.storageClassName) || (self.strategy == 'PVC' && has(self.size))",
            "storageClassName needs strategy: PVC and size: it is for a claim that Conveyor creates",
            lambda cache: not cache.storage_class_name or (cache.strategy == "PVC" and cache.size is not None),
            field="storageClassName",
        ),
        Rule(
            "!has(self.prewarm) || !self.prewarm || self.strategy == 'PVC'",
            "prewarm needs strategy: PVC, where pods find the model that a Job has downloaded",
            lambda cache: not cache.prewarm or cache.strategy == "PVC",
            field="prewarm",
        ),
        Rule(
            "!has(self.size) || !isQuantity(string(self.size))"
            " || quantity(string(self.size)).isGreaterThan(quantity('0'))",
            "size must be more than 0, for example 20Gi",
            lambda cache: cache.size is None or parse_quantity(cache.size) > 0,
            field="size",
        ),
        Rule(
            f"!({_OWN_CLAIM_BEFORE_AND_AFTER}) || !isQuantity(string(self.size))"
            " || !quantity(string(self.size)).isLessThan(quantity(string(oldSelf.size)))",
            "size of an existing claim can only grow; for a smaller one, create a claim and name it in claimName",
            field="size",
        ),
        Rule(
            f"!({_OWN_CLAIM_BEFORE_AND_AFTER})"
            " || (has(self.storageClassName) ? self.storageClassName : '')"
            " == (has(oldSelf.storageClassName) ? oldSelf.storageClassName : '')",
            "storageClassName of an existing claim cannot change; for another, create a claim and name it in claimName",
            field="storageClassName",
        ),
    )

    strategy: Literal["EmptyDir", "PVC"] = "EmptyDir"
    """EmptyDir: each pod downloads the model. PVC: all pods share one copy in a PersistentVolumeClaim."""
    claim_name: Annotated[str, Field(min_length=1, max_length=253)] | None = None
    """PVC: name of an existing claim to keep models in."""
    size: Quantity | None = None
    """PVC: size of the claim `<name>-models` that Conveyor creates. EmptyDir: limit of the folder; 200Gi if not set."""
    storage_class_name: Annotated[str, Field(min_length=1, max_length=253)] | None = None
    """Storage class of the claim that Conveyor creates; default: the cluster's."""
    prewarm: bool | None = None
    """PVC: a Job without a GPU downloads the model before pods that need it are created or replaced."""


ModelUri = Annotated[
    str,
    Field(min_length=1, max_length=512),
    Rule(
        " || ".join(f"self.startsWith('{scheme}')" for scheme in _SCHEMES),
        "must start with hf:// (Hugging Face hub), s3:// (bucket), pvc:// (PersistentVolumeClaim) or oci:// (image), "
        "for example hf://Qwen/Qwen3-0.6B",
        lambda uri: uri.startswith(_SCHEMES),
    ),
    Rule(
        f"!self.startsWith('{HUB_SCHEME}') || self.matches('{_HUB_PATTERN}') && !self.contains('..')",
        "must have the form hf://organisation/name[@revision][:file]",
        lambda uri: not uri.startswith(HUB_SCHEME) or (re.fullmatch(_HUB_PATTERN, uri) and ".." not in uri),
    ),
    Rule(
        f"!self.matches('{_BUCKET_OR_CLAIM}') || self.matches('{_BUCKET_PATTERN}|{_VOLUME_PATTERN}')"
        " && !self.matches('/[.]{1,2}(/|$)')",
        "must have the form s3://bucket/prefix or pvc://claim/path",
        lambda uri: not re.match(_BUCKET_OR_CLAIM, uri) or is_valid_uri(uri, f"{_BUCKET_PATTERN}|{_VOLUME_PATTERN}"),
    ),
    Rule(
        f"!self.startsWith('{IMAGE_SCHEME}') || self.matches('{_IMAGE_PATTERN}') && !self.matches('/[.]{{1,2}}(/|$)')",
        "must have the form oci://registry/repository[:tag][@sha256:digest][//path]",
        lambda uri: not uri.startswith(IMAGE_SCHEME) or is_valid_uri(uri, _IMAGE_PATTERN),
    ),
]

ModelName = Annotated[
    str,
    Field(min_length=1, max_length=128),
    Rule(
        f"self.matches('{_SERVED_NAME_PATTERN}')",
        "must start and end with a letter or digit; between them also . _ - / : @ are allowed",
        lambda name: re.fullmatch(_SERVED_NAME_PATTERN, name) is not None,
    ),
]


SECRET_RULES: Final = (
    Rule(
        f"!has(self.secretRef) || self.uri.startsWith('{HUB_SCHEME}') || self.uri.startsWith('{BUCKET_SCHEME}')",
        "secretRef is for hf:// and s3://; remove it for pvc://, and for oci:// name the Secret in "
        "pod.imagePullSecrets",
        lambda fetched: fetched.secret_ref is None or not fetched.uri.startswith((VOLUME_SCHEME, IMAGE_SCHEME)),
        field="secretRef",
    ),
    Rule(
        f"!has(self.secretRef) || !has(self.secretRef.key) || !self.uri.startsWith('{BUCKET_SCHEME}')",
        f"the Secret for s3:// has the keys {' and '.join(names.BUCKET_KEYS)}; remove secretRef.key",
        lambda fetched: (
            fetched.secret_ref is None or fetched.secret_ref.key is None or not fetched.uri.startswith(BUCKET_SCHEME)
        ),
        field="secretRef",
    ),
)
"""Rules for an object with `uri` and `secretRef`."""


Quantization = Literal["INT8", "INT4"]


class Model(ApiModel):
    """The model to serve, its source, and its cache."""

    rules: ClassVar = (
        Rule(
            f"!self.uri.startsWith('{VOLUME_SCHEME}') || !has(self.cache) || self.cache.strategy != 'PVC'",
            "a pvc:// model is read from its own claim and needs no cache; remove cache.strategy: PVC",
            lambda model: not model.uri.startswith(VOLUME_SCHEME) or model.cache.strategy != "PVC",
            field="cache",
        ),
        Rule(
            f"!self.uri.startsWith('{IMAGE_SCHEME}') || !has(self.cache) || self.cache.strategy != 'PVC'",
            "an oci:// model is an image, which each node keeps, and needs no cache; remove cache.strategy: PVC",
            lambda model: not model.uri.startswith(IMAGE_SCHEME) or model.cache.strategy != "PVC",
            field="cache",
        ),
        *SECRET_RULES,
    )

    uri: ModelUri
    """Source: `hf://organisation/name[@revision][:file]`, `s3://bucket/prefix`, `pvc://claim/path` or
`oci://registry/repository[:tag][@digest][//path]`. Default revision for `hf://`: `main`;
`file`: a GGUF file, or its end as in `Q4_K_M`."""
    name: ModelName | None = None
    """Name that clients put in `model`; default: `metadata.name`."""
    secret_ref: SecretRef | None = None
    """Credentials for a private or gated model of the hub, or for a bucket."""
    quantization: Quantization | None = None
    """Rounds the weights of linear layers when an engine loads the model: INT8 to 8 bits, INT4 to 4 bits.
    Default: the weights stay as they are. A change replaces the pods."""
    cache: Cache = Cache()
    """The cache of downloaded models."""

    @property
    def source(self) -> ModelSource:
        """Return the parsed uri."""
        return parse_model_uri(self.uri)
