"""The demo of all tasks but text alone: a service, one request, and how a burst of requests became batches.

`python -m e2e.demo TASK`. Called by `__main__`. The demo without a task shows the scaling, which is the same for all.
"""

import base64
import io
import json
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

import httpx
import yaml
from PIL import Image
from rich.console import Console

from conveyor_api import names
from e2e import kube
from e2e.cluster.paths import REPOSITORY
from e2e.demo_model import demo_model_directory
from e2e.demo_model.shapes import COLOURS, SHAPES, WHITE, draw_shape, paint_shape
from e2e.gateway import service_url
from e2e.services import provide_demo_model

NUM_CLIENTS: Final = 16
REQUESTS_EACH: Final = 8
SENTENCES: Final = (
    "A dictionary display is a series of key and value pairs.",
    "Lists are mutable sequences, typically used to store collections of homogeneous items.",
    "An exception can be handled by the try statement.",
    "The assert statement",
)


@dataclass(frozen=True, slots=True)
class Task:
    """The request to a service of `examples/NAME.yaml`, and how its answer is shown."""

    path: str  # below the service's base
    body: dict[str, Any]
    describe: Callable[..., list[str]]  # (answer, and the answer to `second`) -> lines to print
    model: str  # of `e2e.demo_model`
    second: dict[str, Any] | None = None
    file: str = ""  # of the repository, sent in a form with the body's fields; empty: the body is sent as JSON

    def post(self, url: str, body: dict[str, Any]) -> httpx.Response:
        """Send a body to the service at `url` and return its answer."""
        if not self.file:
            return httpx.post(url + self.path, json=body, timeout=60)
        files = {"file": (Path(self.file).name, (REPOSITORY / self.file).read_bytes())}
        return httpx.post(url + self.path, data=body, files=files, timeout=60)


def _encode(image: Image.Image) -> str:
    """Return the picture as a PNG in base64."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def _draw(shape: str) -> str:
    return _encode(draw_shape(shape, Random(shape)))


def _paint(colour: str, shape: str) -> str:
    return _encode(paint_shape(shape, COLOURS[colour], WHITE, Random(f"{colour} {shape}")))


def _ask(question: str) -> dict[str, Any]:
    """Return a chat with a question about the picture of two shapes."""
    picture = base64.b64encode((REPOSITORY / "examples" / "shapes.png").read_bytes()).decode()
    parts = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}},
        {"type": "text", "text": question},
    ]
    return {"messages": [{"role": "user", "content": parts}], "temperature": 0}


def _find(pictures: Any, texts: Any) -> list[str]:
    """Return for each text the picture with the nearest vector, and the similarity."""
    vectors = [one["embedding"] for one in pictures["data"]]
    found = []
    for text, one in zip(PICTURES, texts["data"], strict=True):
        nearness = [sum(a * b for a, b in zip(one["embedding"], vector, strict=True)) for vector in vectors]
        best = max(range(len(vectors)), key=nearness.__getitem__)
        found.append(f"{f'a {text}':14} -> picture {best + 1}, the {PICTURES[best]} ({nearness[best]:.3f})")
    return found


def _describe_pictures(answer: Any) -> list[str]:
    """The size of each picture, and the colour of what it shows."""
    return [f"picture {index + 1}: {_name_colour(one['b64_json'])}" for index, one in enumerate(answer["data"])]


def _name_colour(encoded: str) -> str:
    """Return the size, and the colour nearest to the darkest quarter of the pixels, which are the shape."""
    image = Image.open(io.BytesIO(base64.b64decode(encoded)))
    pixels = sorted(image.get_flattened_data(), key=sum)
    shape = pixels[: len(pixels) // 4]
    mean = [sum(pixel[channel] for pixel in shape) / len(shape) for channel in range(3)]
    nearest = min(COLOURS, key=lambda name: sum(abs(a - b) for a, b in zip(COLOURS[name], mean, strict=True)))
    return f"{image.width}x{image.height}, {nearest}"


PICTURES: Final = ("red circle", "blue square", "green star", "black triangle", "blue circle")
QUESTION: Final = "How do I use dictionaries?"
TASKS: Final = {
    "embed": Task(
        "/v1/embeddings",
        {"input": [QUESTION, *SENTENCES]},
        lambda answer: [f"{len(one['embedding'])} numbers" for one in answer["data"]],
        "demo-embed",
    ),
    "rerank": Task(
        "/v1/rerank",
        {"query": QUESTION, "documents": list(SENTENCES), "return_documents": True},
        lambda answer: [f"{one['relevance_score']:.3f}  {one['document']['text']}" for one in answer["results"]],
        "demo-rerank",
    ),
    "classify": Task(
        "/classify",
        {"input": [QUESTION, "How do I catch an exception?", "What is a module?", SENTENCES[0]]},
        lambda answer: [f"{one['label']:12} {max(one['probs']):.3f}" for one in answer["data"]],
        "demo-classify",
    ),
    "image-classify": Task(
        "/v1/images/classify",
        {"images": [_draw(shape) for shape in SHAPES], "top_k": 2},
        lambda answer: [", ".join(f"{b['label']:9} {b['score']:.3f}" for b in one["scores"]) for one in answer["data"]],
        "demo-image",
    ),
    "image-embed": Task(
        "/v1/embeddings",
        {"modality": "image", "input": [_paint(*picture.split()) for picture in PICTURES]},
        _find,
        "demo-clip",
        {"input": [f"a {picture}" for picture in PICTURES]},
    ),
    "see": Task(
        "/v1/chat/completions",
        _ask("What is this?"),
        lambda *answers: [answer["choices"][0]["message"]["content"] for answer in answers],
        "demo-see",
        _ask("What is on the left?"),
    ),
    "transcribe": Task(
        "/v1/audio/transcriptions",
        {"response_format": "verbose_json"},
        lambda answer: [
            answer["language"],
            *(f"{one['start']:5.1f} s to {one['end']:4.1f} s {one['text']}" for one in answer["segments"]),
        ],
        "demo-audio",
        file="examples/words.mp3",
    ),
    "image-generate": Task(
        "/v1/images/generations",
        {"prompt": "a red square", "n": 2, "seed": 1, "num_inference_steps": 20},
        _describe_pictures,
        "demo-paint",
    ),
    "custom": Task(
        "/v2/models/custom/infer",
        {"inputs": [{"name": "input", "shape": [2, 4], "datatype": "FP32", "data": [[1, 2, 3, 4], [0, 0, 0, 0]]}]},
        lambda answer: [
            f"{one['name']}: {', '.join(f'{number:.3f}' for number in one['data'])}" for one in answer["outputs"]
        ],
        "custom",
    ),
}


def show(console: Console, name: str, namespace: str, wait_for: Callable[[str, str, float], None]) -> None:
    """Show a task. `wait_for(service, condition, since)` must return when the service has the condition."""
    task, file = TASKS[name], kube.MANIFESTS / f"{name}.yaml"
    service = yaml.safe_load(file.read_text())["metadata"]["name"]
    console.rule(f"1. Apply examples/{file.name}")
    demo_model_directory(task.model)
    provide_demo_model(namespace)
    started = time.monotonic()
    kube.kubectl("apply", "--server-side", "-n", namespace, "-f", str(file))
    wait_for(service, "Ready", started)
    console.print(kube.kubectl("get", "infsvc", service, "-n", namespace, "-o", "wide").rstrip(), highlight=False)
    url = service_url(service, namespace).removesuffix("/v1")
    console.rule(f"2. POST {task.path}")
    bodies = [task.body] if task.second is None else [task.body, task.second]
    for body in bodies:
        console.print(f"> {_shorten(json.dumps(body))} {task.file}".rstrip(), style="bold", highlight=False)
    for line in task.describe(*(_post(task, url, body) for body in bodies)):
        console.print(line, highlight=False)
    console.rule(f"3. {NUM_CLIENTS} clients, {REQUESTS_EACH} requests each")
    before, began = _count_batches(service, namespace), time.monotonic()
    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        answers = list(clients.map(lambda _: _post(task, url, task.body), range(NUM_CLIENTS * REQUESTS_EACH)))
    seconds, now = time.monotonic() - began, _count_batches(service, namespace)
    inputs, steps = now["inputs"] - before["inputs"], now["steps"] - before["steps"]
    console.print(
        f"{len(answers)} requests, {steps:g} steps of {inputs / max(1, steps):.1f} requests each, "
        f"{len(answers) / seconds:.1f} requests a second"
    )
    closes = {name: now[name] - before.get(name, 0) for name in now if name not in ("inputs", "steps")}
    if why := ", ".join(f"{reason} {count:g}" for reason, count in closes.items() if count):
        console.print(f"batches closed: {why}")


def _shorten(body: str) -> str:
    """Return the body with only the beginning of each image."""
    return re.sub(r'(iVBOR[^"]{20})[^"]*', r"\1...", body)


def _post(task: Task, url: str, body: dict[str, Any]) -> Any:
    answer = task.post(url, body)
    answer.raise_for_status()
    return answer.json()


def _count_batches(service: str, namespace: str) -> dict[str, float]:
    """Return the inputs, steps and closed batches (by reason) that the service's only engine has counted."""
    pods = kube.kubectl("get", "pods", "-n", namespace, "-l", names.pod_selector_string(service), "-o", "name")
    pod = pods.split()[0].removeprefix("pod/")
    page = kube.kubectl("get", "--raw", f"/api/v1/namespaces/{namespace}/pods/{pod}:8000/proxy/metrics")
    counts = {
        "inputs": _read(page, "conveyor_engine_batch_size_sum"),
        "steps": _read(page, "conveyor_engine_steps_total"),
    }
    closes = re.findall(r'^conveyor_engine_batch_close_total\{.*reason="(\w+)".*\} (\S+)$', page, re.MULTILINE)
    return counts | {reason: float(count) for reason, count in closes}


def _read(page: str, name: str) -> float:
    match = re.search(rf"^{name}(?:\{{.*\}})? (\S+)$", page, re.MULTILINE)
    return float(match[1]) if match else 0.0
