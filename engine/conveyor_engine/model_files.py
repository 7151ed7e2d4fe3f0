"""Reads JSON files in a model's directory, and checks that its files can be read.

Used by all modules that read such files.
"""

import json
import os
from pathlib import Path
from typing import Any, Final, TypeVar

from safetensors import SafetensorError, safe_open

from conveyor_engine.errors import ModelError
from conveyor_engine.limited import run_limited
from conveyor_protocol.failure_reasons import FailureReason

WEIGHTS_INDEX = "model.safetensors.index.json"
FILES_CPU_SECONDS: Final = 60.0  # limit for a check, which reads only the headers of weight files: a few MiB together
EXPORTED_PROGRAM: Final = "model.pt2"  # written by torch.export.save
PROGRAM_SETTINGS: Final = "model.json"  # settings of a model of the task `custom`
PROCESSOR_FILES: Final = ("preprocessor_config.json", "processor_config.json")
PIPELINE_INDEX: Final = "model_index.json"  # index of a diffusers pipeline; each part of the pipeline has a folder
PIPELINE_WEIGHTS_INDEX: Final = "diffusion_pytorch_model.safetensors.index.json"  # in the folder of a part
# The files of weights in the folders of a pipeline, without what follows in their names.
PIPELINE_WEIGHTS: Final = {
    "text_encoder": "model", "text_encoder_2": "model", "text_encoder_3": "model",
    "transformer": "diffusion_pytorch_model", "unet": "diffusion_pytorch_model", "vae": "diffusion_pytorch_model",
}  # fmt: skip
PIPELINE_TOKENIZERS: Final = ("tokenizer", "tokenizer_2", "tokenizer_3")
PIPELINE_FOLDERS: Final = ("scheduler", *PIPELINE_TOKENIZERS, *PIPELINE_WEIGHTS)  # the folders that the engine reads
# A model has at least one of these files.
MODEL_FILES: Final = ("config.json", EXPORTED_PROGRAM, PROGRAM_SETTINGS, PIPELINE_INDEX)
# Files in which ModelOpt, AutoGPTQ and AutoAWQ described weights before config.json had `quantization_config`.
QUANTIZATION_FILES: Final = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
MODEL_CARD: Final = "README.md"  # its front matter names the model that a quantized one was made from
SENTENCE_MODULES = "modules.json"  # of models that embed
SENTENCE_SETTINGS: Final = "config_sentence_transformers.json"  # of models that embed or rank
SENTENCE_LIMITS: Final = "sentence_bert_config.json"  # how sentence-transformers reads texts
_LABELS_DEFAULT = 2  # transformers' default if config.json has no number
_READ = (".json", ".jinja", ".safetensors")
_MAX_BYTES = 16 << 20  # of one JSON file; most have a few KiB, a config.json with many labels a few MiB
_Content = TypeVar("_Content", dict[str, Any], list[Any])


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in the file; empty if the file is missing.

    Raises ModelError for a file that is not a JSON object or has more than 16 MiB.
    """
    return _read(path, {}, "object")


def read_architectures(directory: Path) -> list[str]:
    """Return the names of transformers' classes in config.json. Raises ModelError."""
    names = read_object(directory / "config.json").get("architectures")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def read_pipeline_class(directory: Path) -> str:
    """Return the name of diffusers' class for the pipeline. Raises ModelError."""
    return str(read_object(directory / PIPELINE_INDEX).get("_class_name"))[:200]


def list_folders(directory: Path) -> list[Path]:
    """Return the folders with a model's files: `directory` and, for a pipeline, the folders of its parts."""
    is_pipeline = (directory / PIPELINE_INDEX).is_file()
    parts = [directory / name for name in PIPELINE_FOLDERS] if is_pipeline else []
    return [directory, *(part for part in parts if part.is_dir())]


def has_image_processor(directory: Path) -> bool:
    """Return whether the directory has the files of an image processor."""
    return any((directory / name).is_file() for name in PROCESSOR_FILES)


def has_vision(directory: Path) -> bool:
    """Return whether config.json describes an encoder of images in addition to one of texts. Raises ModelError."""
    config = read_object(directory / "config.json")
    return all(isinstance(config.get(name), dict) for name in ("vision_config", "text_config"))


def scores_tokens(directory: Path) -> bool:
    """Return whether sentence-transformers' files name a causal model that ranks by its logits of one or two tokens.

    Raises ModelError.
    """
    return read_module_kinds(directory) == ["Transformer", "LogitScore"]


def read_module_kinds(directory: Path) -> list[str]:
    """Return the names of the classes in sentence-transformers' list of modules, in their order. Raises ModelError."""
    return [str(module.get("type", "")).rpartition(".")[2] for module in read_modules(directory)]


def read_modules(directory: Path) -> list[dict[str, Any]]:
    """Return sentence-transformers' list of modules; empty if there is none. Raises ModelError."""
    modules = read_list(directory / SENTENCE_MODULES)
    if not all(isinstance(module, dict) for module in modules):
        raise ModelError(f"{SENTENCE_MODULES} in {directory} has an entry that is not an object")
    return modules


def reads_masked_lm(directory: Path) -> bool:
    """Return whether a model that embeds has a head for masked tokens, from which SPLADE makes sparse vectors.

    Without sentence-transformers' files, all models that config.json calls masked language models have it, as
    sentence-transformers' SparseEncoder assumes. Raises ModelError.
    """
    if (directory / SENTENCE_MODULES).is_file():
        return "SpladePooling" in read_module_kinds(directory)
    names = read_architectures(directory)
    return bool(names) and all(name.endswith("ForMaskedLM") for name in names)


def count_labels(directory: Path) -> int:
    """Return the number of labels of a classifier, as transformers reads config.json. Raises ModelError."""
    config = read_object(directory / "config.json")
    labels, number = config.get("id2label"), config.get("num_labels")
    if isinstance(labels, dict):
        return len(labels)
    return number if type(number) is int else _LABELS_DEFAULT


def read_list(path: Path) -> list[Any]:
    """Return the JSON list in the file; empty if the file is missing. Raises ModelError as `read_object` does."""
    return _read(path, [], "list")


def read_weight_names(directory: Path, index: str) -> list[str] | None:
    """Return the files that an index of weights names; None if there is no index. Raises ModelError."""
    named = read_object(directory / index).get("weight_map")
    if not isinstance(named, dict):
        return None
    names = sorted({name for name in named.values() if isinstance(name, str)})
    for name in names:
        check_is_inside(directory, name, index)
    return names


def check_is_inside(directory: Path, name: str, by: str) -> None:
    """Raise ModelError if `name`, which the file `by` has, leads out of the model's directory or into a folder.

    Links in folders are not checked when a volume is mounted, and a tenant may not read the pod's other files.
    """
    if Path(name).name != name or name == "..":
        raise ModelError(f"{by} in {directory} names {name[:200]!r}, which is not a file of this directory")


def check_files(directory: Path) -> None:
    """Raise ModelError (ModelUnreadable) for a file that this process may not read, or that is incomplete.

    Only the beginnings of files are read, so this is fast even for large weights. Also raises ModelError if
    reading exceeds a limit.
    """
    run_limited(f"{directory}", lambda: _check_files(directory), FILES_CPU_SECONDS)


def _check_files(directory: Path) -> None:
    paths = (path for folder in list_folders(directory) for path in folder.iterdir())
    for path in sorted(path for path in paths if path.suffix in _READ):
        try:
            if path.is_file():
                path.open("rb").close()
        except OSError as error:
            raise unreadable(path, error) from error
        if path.suffix == ".safetensors" and path.is_file():
            _check_weights(path)
    for folder in list_folders(directory):
        for index in (WEIGHTS_INDEX, PIPELINE_WEIGHTS_INDEX):
            _check_index(folder, index)


def _check_index(folder: Path, index: str) -> None:
    names = read_weight_names(folder, index) or ()
    if absent := [name for name in names if not (folder / name).is_file()]:
        raise ModelError(
            f"{folder} is incomplete: {index} names {absent[0]}, which is not there",
            reason=FailureReason.MODEL_UNREADABLE,
        )


def unreadable(path: Path, error: OSError) -> ModelError:
    """Return the error for a file or directory that this process cannot read. The message names the user."""
    message = f"user {os.getuid()} of group {os.getgid()} cannot read {path}: {error.strerror or error}"
    if isinstance(error, PermissionError):
        message += "; make it readable for that user (chmod -R a+rX), or run the pod as one that may read it"
    return ModelError(message, reason=FailureReason.MODEL_UNREADABLE)


def _check_weights(path: Path) -> None:
    try:
        with safe_open(path, framework="numpy"):
            pass
    except SafetensorError as error:
        num_bytes = path.stat().st_size
        message = f"{path} ({num_bytes} bytes) is not a whole safetensors file, copy or download it again: {error}"
        raise ModelError(message, reason=FailureReason.MODEL_UNREADABLE) from error


def _read(path: Path, empty: _Content, name: str) -> _Content:
    if not path.is_file():
        return empty
    try:
        if (num_bytes := path.stat().st_size) > _MAX_BYTES:
            raise ValueError(f"it has {num_bytes} bytes; at most {_MAX_BYTES} are allowed")
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, type(empty)):
        raise ModelError(f"{path} cannot be read: it is not a JSON {name}")
    return content
