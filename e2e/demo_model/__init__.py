"""The demo's model: a small Llama trained here, in minutes, on the documentation that every Python carries.

So that the demo's answers read like text about Python with nothing downloaded. Used by `e2e.services` and by
`python -m e2e.demo_model`; knows nothing of Kubernetes. `corpus` writes the text, `train` learns it.
"""

import hashlib
import os
import shutil
import sys
from pathlib import Path

from e2e.cluster.paths import CACHE

COMPLETE = ".complete"  # written last, holds the model's key: a folder without it is half made, or of an old recipe
SOURCES = ("corpus.py", "train.py")


def model_key() -> str:
    """What the model is made from, as 12 hex digits: the two scripts and the text they train on."""
    from e2e.demo_model.corpus import topics

    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update((Path(__file__).parent / name).read_bytes())
    for title, text in sorted(topics.items()):
        digest.update(f"{title}\0{text}\0".encode())
    return digest.hexdigest()[:12]


def demo_model_directory() -> Path:
    """The folder `demo` of the trained model, trained first if the cache lacks it. Prints its progress to stderr.

    Its place does not change with the recipe: volumes of clusters name it.
    """
    directory = CACHE / "models" / "demo"
    marker = directory / COMPLETE
    if not marker.exists() or marker.read_text() != model_key():
        make(directory)
    return directory


def make(directory: Path) -> None:
    """Train into a folder beside `directory`, then move it there: whoever sees `directory` sees a whole model."""
    from e2e.demo_model.train import train

    half_made = directory.with_name(f".{directory.name}.{os.getpid()}")
    half_made.mkdir(parents=True)
    try:
        train(half_made, lambda line: print(f"demo model: {line}", file=sys.stderr, flush=True))
        (half_made / COMPLETE).write_text(model_key())
        if directory.exists():
            shutil.rmtree(directory)
        half_made.rename(directory)
    finally:
        shutil.rmtree(half_made, ignore_errors=True)
