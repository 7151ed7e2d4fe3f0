"""Models to try offline, one for each task. They are trained here in minutes, on the documentation that is part of
Python.

`demo` is a small Llama, so that the demo's answers look like text about Python without a download. Three models are
small BERTs: `demo-embed` finds a page for a question, `demo-rerank` orders texts by a question, and `demo-classify`
names a text's subject. `demo-image` is a small ResNet that names the shape in an image. `demo-clip` is a small CLIP
that finds images by words. `demo-see` is a small LLaVA that answers questions about images. `demo-paint` is a small
diffusion model that paints images. `demo-audio` is a small Whisper that understands tones. `custom` is a program of
torch.export. `scripted` has answers that are written down, for tests of coding agents.

Used by `e2e.services` and by `python -m e2e.demo_model`. Knows nothing of Kubernetes. `corpus` writes the text, and the
modules named `train...` train the models on it.
"""

import hashlib
import os
import shutil
import sys
from importlib import import_module
from pathlib import Path

from e2e.cluster.paths import CACHE

COMPLETE = ".complete"  # written last, with the model's key; without it, the folder is incomplete or of an older recipe
DEMO, EMBEDDING, RERANKER, CLASSIFIER = "demo", "demo-embed", "demo-rerank", "demo-classify"
IMAGE_CLASSIFIER, IMAGE_EMBEDDING, PAINTER, SEEING = "demo-image", "demo-clip", "demo-paint", "demo-see"
SPEECH, PROGRAM = "demo-audio", "custom"
SCRIPT = "scripted"
# The modules that make each model. The last one has the function `train`.
SOURCES = {
    DEMO: ("corpus", "train"),
    EMBEDDING: ("corpus", "bert", "train_encoder"),
    RERANKER: ("corpus", "bert", "train_reranker"),
    CLASSIFIER: ("corpus", "bert", "train_classifier"),
    IMAGE_CLASSIFIER: ("bert", "shapes", "train_shapes"),
    IMAGE_EMBEDDING: ("bert", "shapes", "train_clip"),
    SPEECH: ("bert", "tones", "train_tones"),
    PAINTER: ("bert", "shapes", "train_paint"),
    SEEING: ("bert", "shapes", "scenes", "train_see"),
    PROGRAM: ("bert", "program"),
    SCRIPT: ("script",),
}


def model_key(name: str = DEMO) -> str:
    """Return a hash of the model's sources, 12 hexadecimal digits: of the scripts and of the text to train on."""
    from e2e.demo_model.corpus import topics

    digest = hashlib.sha256()
    for source in SOURCES[name]:
        digest.update((Path(__file__).parent / f"{source}.py").read_bytes())
    for title, text in sorted(topics.items()):
        digest.update(f"{title}\0{text}\0".encode())
    return digest.hexdigest()[:12]


def demo_model_directory(name: str = DEMO) -> Path:
    """Return the folder of the trained model. Trains it first if the cache lacks it, with progress on stderr.

    The folder's path does not change with the recipe, because volumes of clusters name it.
    """
    directory = CACHE / "models" / name
    marker = directory / COMPLETE
    if not marker.exists() or marker.read_text() != model_key(name):
        make(directory, name)
    return directory


def make(directory: Path, name: str = DEMO) -> None:
    """Train in a folder next to `directory`, then rename it. So `directory` never has an incomplete model."""
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
