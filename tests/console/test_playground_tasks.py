"""Tests the form of each task for trying a service, with a real engine of a tiny model and its examples unchanged."""

import asyncio
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.console.process import ConsoleProcess
from tests.console.trying import File, read_curl, read_fields, read_problem, read_receipt, read_text, send
from tests.contract.serving import serving
from tests.engine.chat_model import write_chat_model
from tests.engine.classifiers import LABELS, write_served_classifier
from tests.engine.encoders import SIZE, write_served_encoder
from tests.engine.image_models import draw, encode, save_image_model
from tests.engine.paint_models import save_paint_model
from tests.engine.processes import EngineServer
from tests.engine.speech_models import draw_sound, save_speech_model
from tests.engine.speech_models import encode as encode_sound
from tests.gateway.cluster import Cluster
from tests.gateway.process import GatewayProcess
from torch.export import Dim, export, save

from e2e.cluster.api import Api


def write_program(directory: Path) -> None:
    """Write the program of docs/custom.md."""
    directory.mkdir()
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3), torch.nn.Softmax(-1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(
            export(model.eval(), (torch.zeros(2, 4),), dynamic_shapes=({0: Dim("batch", max=1024)},)),
            directory / "model.pt2",
        )


@dataclass(frozen=True, slots=True)
class Task:
    """`shows`: a pattern of what the answer shows."""

    write: Callable[[Path], object]
    shows: str
    file: File | None = None


LABELLED: dict[str, Any] = {"num_labels": 3, "id2label": dict(enumerate(LABELS))}
TASKS = {
    "Generate": Task(write_chat_model, r"The answer (is complete|has reached its limit)"),
    "Embed": Task(
        lambda to: write_served_encoder("bert", to),
        rf'A dog runs.</td><td data-label="Cosine with the first">1</td><td data-label="Numbers">{SIZE}<',
    ),
    "Rerank": Task(
        lambda to: write_served_classifier("bert", to, num_labels=1),
        r'"Score">[\d.e-]+</td><td data-label="Document">(The assert|A dictionary|Lists are)',
    ),
    "Classify": Task(
        lambda to: write_served_classifier("bert", to, **LABELLED),
        rf'A dog runs.</td><td data-label="Label">({"|".join(LABELS)})</td><td data-label="Score">0?[\d.]+<',
    ),
    "ImageClassify": Task(
        lambda to: save_image_model("vit", to),
        r'"Label">[^<]+</td><td data-label="Score">[\d.e-]+<',
        ("it's.png", encode(draw(0))),
    ),
    "Transcribe": Task(save_speech_model, r"The answer is complete", ("x.wav", encode_sound(draw_sound(0, 5.0)))),
    "ImageGenerate": Task(save_paint_model, r'<img src="data:image/png;base64,[A-Za-z0-9+/=]{100,}" alt="The picture'),
    "Custom": Task(write_program, r"&#34;datatype&#34;: &#34;FP32&#34;"),
}
IN_CI = ("Rerank", "ImageClassify")


@dataclass(frozen=True, slots=True)
class Served:
    """A task and its engine."""

    name: str
    engine: EngineServer


@pytest.fixture(
    scope="module", params=[each if each in IN_CI else pytest.param(each, marks=pytest.mark.slow) for each in TASKS]
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    TASKS[request.param].write(folder / "tiny")
    with EngineServer(folder / "engine", folder / "tiny", host="0.0.0.0", max_num_seqs=4) as engine:
        yield Served(request.param, engine.wait_ready())


async def test_the_form_of_a_task_is_answered_with_a_receipt_and_its_command_too(
    served: Served, playground: ConsoleProcess, gateway: GatewayProcess, crd: Api, namespace: str, token: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    task = TASKS[served.name]
    async with serving(served.engine, [gateway], crd, namespace) as service:
        path, status = f"/services/{service}/try", {"model": {"name": "tiny", "task": served.name}}
        url = f"{gateway.url}/{service}/v1"
        await asyncio.to_thread(Cluster(crd, namespace).set_status, "tiny", **status, readyReplicas=1, url=url)
        page = await asyncio.to_thread(playground.wait_for, '<form id="try"', token, path)
        fields = list(read_fields(page).items())
        changes = await asyncio.to_thread(send, playground, token, service, fields, task.file)
        assert read_problem(changes) == ""
        assert re.search(task.shows, changes), changes
        assert bool(read_text(changes)) == (served.name in ("Generate", "Transcribe"))
        assert " with 200 in " in read_receipt(changes)
        assert "engine_ms" in changes
        if task.file is not None:
            (tmp_path / task.file[0]).write_bytes(task.file[1])
        run = await asyncio.create_subprocess_exec(
            *("bash", "-c", f"{read_curl(changes)} --silent --fail"), cwd=tmp_path, stdout=asyncio.subprocess.PIPE
        )
        printed, _ = await run.communicate()
    assert (run.returncode, b"error" in printed) == (0, False), printed
