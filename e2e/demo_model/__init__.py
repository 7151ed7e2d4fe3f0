"""Models to try offline, one for each task, trained here in minutes on the documentation that every Python carries.

`demo` is a small Llama, so that the demo's answers read like text about Python with nothing downloaded. Small BERTs are
`demo-embed`, which finds a page by a question, `demo-rerank`, which orders texts by one, and `demo-classify`, which
names a text's subject. `demo-image` is a small ResNet, which names the shape in a picture, `demo-clip` a small CLIP,
which finds pictures by words, and `demo-paint` a small diffusion model, which paints such pictures. `demo-audio` is a
small Whisper, which understands tones. `custom` is a program of torch.export. Used by `e2e.services` and by
`python -m e2e.demo_model`; knows nothing of Kubernetes. `corpus` writes the text, `train` and the modules like it learn
it.
"""

import hashlib
import os
import shutil
import sys
from importlib import import_module
from pathlib import Path

from e2e.cluster.paths import CACHE

COMPLETE = ".complete"  # written last, holds the model's key: a folder without it is half made, or of an old recipe
DEMO, EMBEDDING, RERANKER, CLASSIFIER = "demo", "demo-embed", "demo-rerank", "demo-classify"
IMAGE_CLASSIFIER, IMAGE_EMBEDDING, PAINTER = "demo-image", "demo-clip", "demo-paint"
SPEECH, PROGRAM = "demo-audio", "custom"
# The modules that make each; the last one has `train`.
SOURCES = {
    DEMO: ("corpus", "train"),
    EMBEDDING: ("corpus", "bert", "train_encoder"),
    RERANKER: ("corpus", "bert", "train_reranker"),
    CLASSIFIER: ("corpus", "bert", "train_classifier"),
    IMAGE_CLASSIFIER: ("bert", "shapes", "train_shapes"),
    IMAGE_EMBEDDING: ("bert", "shapes", "train_clip"),
    SPEECH: ("bert", "tones", "train_tones"),
    PAINTER: ("bert", "shapes", "train_paint"),
    PROGRAM: ("bert", "program"),
}


def model_key(name: str = DEMO) -> str:
    """What the model is made from, as 12 hex digits: the scripts and the text they train on."""
    from e2e.demo_model.corpus import topics

    digest = hashlib.sha256()
    for source in SOURCES[name]:
        digest.update((Path(__file__).parent / f"{source}.py").read_bytes())
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
    train = import_module(f"e2e.demo_model.{SOURCES[name][-1]}").train
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
