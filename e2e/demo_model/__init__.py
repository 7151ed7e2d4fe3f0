"""Two models to try offline, trained here in minutes on the documentation that every Python carries.

`demo` is a small Llama, so that the demo's answers read like text about Python with nothing downloaded; `demo-embed` is
a small BERT that finds a page by a question. Used by `e2e.services` and by `python -m e2e.demo_model`; knows nothing of
Kubernetes. `corpus` writes the text, `train` and `train_encoder` learn it.
"""

import hashlib
import os
import shutil
import sys
from pathlib import Path

from e2e.cluster.paths import CACHE

COMPLETE = ".complete"  # written last, holds the model's key: a folder without it is half made, or of an old recipe
DEMO, EMBEDDING = "demo", "demo-embed"
SOURCES = {DEMO: ("corpus.py", "train.py"), EMBEDDING: ("corpus.py", "train_encoder.py")}


def model_key(name: str = DEMO) -> str:
    """What the model is made from, as 12 hex digits: the two scripts and the text they train on."""
    from e2e.demo_model.corpus import topics

    digest = hashlib.sha256()
    for source in SOURCES[name]:
        digest.update((Path(__file__).parent / source).read_bytes())
    for title, text in sorted(topics.items()):
        digest.update(f"{title}\0{text}\0".encode())
    return digest.hexdigest()[:12]


def demo_model_directory(name: str = DEMO) -> Path:
    """The folder `name` of the trained model, trained first if the cache lacks it. Prints its progress to stderr.

    Its place does not change with the recipe: volumes of clusters name it.
    """
    directory = CACHE / "models" / name
    marker = directory / COMPLETE
    if not marker.exists() or marker.read_text() != model_key(name):
        make(directory, name)
    return directory


def make(directory: Path, name: str = DEMO) -> None:
    """Train into a folder beside `directory`, then move it there: whoever sees `directory` sees a whole model."""
    if name == EMBEDDING:
        from e2e.demo_model.train_encoder import train
    else:
        from e2e.demo_model.train import train

    half_made = directory.with_name(f".{directory.name}.{os.getpid()}")
    half_made.mkdir(parents=True)
    try:
        train(half_made, lambda line: print(f"{name} model: {line}", file=sys.stderr, flush=True))
        (half_made / COMPLETE).write_text(model_key(name))
        if directory.exists():
            shutil.rmtree(directory)
        half_made.rename(directory)
    finally:
        shutil.rmtree(half_made, ignore_errors=True)
