"""Brings the small files of a model to a folder: everything but the weights, of which only the size is needed."""

from pathlib import Path
from typing import Final, NamedTuple

from conveyor_engine.errors import ModelError
from conveyor_engine.fetching.fetch import choose_files
from conveyor_engine.fetching.source import RemoteModel, Source
from conveyor_engine.fetching.uris import BucketUri, HubUri, parse_uri
from conveyor_engine.gguf.files import SUFFIX, group_files
from conveyor_engine.gguf.unpack import make_temporary, unpack
from conveyor_engine.model_files import WEIGHTS_INDEX, list_folders, read_weight_names

_SMALL_BYTES: Final = 64 << 20  # of all small files together
_WEIGHTS: Final = (".safetensors", SUFFIX, ".pt2")


class Preview(NamedTuple):
    """A folder with the small files of a model. stored_bytes: of its weights, on the disk or the hub."""

    directory: Path
    stored_bytes: int


def find_small_files(model: str) -> Preview:
    """Return the files of a folder, of a GGUF file, or of an address: hf://, s3:// or organisation/name.

    Raises StartError.
    """
    path = Path(model)
    if path.exists():
        directory = unpack(path)
        files = (each for folder in list_folders(directory) for each in folder.iterdir())
        return Preview(directory, sum(each.stat().st_size for each in files if each.suffix in _WEIGHTS))
    uri = model if "://" in model else f"hf://{model}"
    parsed = parse_uri(uri)
    if parsed is None:
        raise ModelError(f"{model} is mounted into pods; give the folder")
    return _fetch(_open(parsed))


def _open(parsed: HubUri | BucketUri) -> Source:
    if isinstance(parsed, HubUri):
        if parsed.file:
            raise ModelError("a GGUF file is checked when it is on this machine; give its path")
        from conveyor_engine.fetching.hub import Hub

        return Hub(parsed.repository, parsed.revision)
    from conveyor_engine.fetching.bucket import Bucket

    return Bucket(*parsed)


def _fetch(source: Source) -> Preview:
    model = source.describe()
    names = {file.name for file in model.files}
    if group_files(names) and not any(name.endswith(".safetensors") for name in names):
        raise ModelError(f"{model} has GGUF files, which are checked when they are on this machine; give the path")
    directory = make_temporary("preview-")
    chosen = choose_files(model, _list_weights(source, model, directory))
    small = [file for file in chosen if not file.name.endswith(_WEIGHTS)]
    if (num_bytes := sum(file.size for file in small)) > _SMALL_BYTES:
        raise ModelError(f"{model} has {num_bytes >> 20} MiB of files beside its weights")
    for file in small:
        (directory / file.name).parent.mkdir(exist_ok=True)
        source.download(model, file, directory / file.name)
    return Preview(directory, sum(file.size for file in chosen if file.name.endswith(_WEIGHTS)))


def _list_weights(source: Source, model: RemoteModel, directory: Path) -> list[str] | None:
    """Return the files that the index names; None if the model has no index."""
    index = next((file for file in model.files if file.name == WEIGHTS_INDEX), None)
    if index is None or index.size > _SMALL_BYTES:
        return None
    source.download(model, index, directory / WEIGHTS_INDEX)
    names = read_weight_names(directory, WEIGHTS_INDEX)
    (directory / WEIGHTS_INDEX).unlink()  # the weights that it names are not there
    return names
