"""Logits equal transformers' within 1e-4, in float32, whatever they are batched with: in every mode, for each family.

The mutation tests at the end show that the comparison can fail.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.engine.classifiers import logits_of, save_classifier
from tests.engine.embedding_cores import distance, make_core, run
from tests.engine.image_models import KINDS, SIDE, draw, open_pipeline, save_image_model, save_processor
from tests.engine.tiny_models import save_tiny_model

from conveyor_engine.errors import ConfigError, ModelError
from conveyor_engine.images.processor import load_processor
from conveyor_engine.loop.core import EngineCore
from conveyor_engine.tasks.imageclassify.execution import ImageClassifyRunner
from conveyor_engine.wire.images import ImageFacts, PictureShape, encode_pixels
from conveyor_engine.wire.request import EngineRequest

SIZES = ((60, 40), (32, 32), (33, 100), (200, 150), (1, 1), (7, 500), (64, 64))
PICTURES = [draw(number, size) for number, size in enumerate(SIZES)]
MODES = ("none", "static", "dynamic")


class Classifier:
    """A tiny model, and the logits of transformers' pipeline of all pictures."""

    def __init__(self, kind: str, directory: Path, **changes: Any) -> None:
        self.directory = directory
        self.model = save_image_model(kind, directory, **changes)
        pipeline = open_pipeline(directory, self.model)
        labels = list(self.model.config.id2label.values())
        scores = [pipeline(each, top_k=len(labels), function_to_apply="none") for each in PICTURES]
        self.logits = [
            torch.tensor([each["score"] for each in sorted(one, key=lambda each: labels.index(each["label"]))])
            for one in scores
        ]

    def make_core(self, **changes: Any) -> EngineCore:
        return make_core(self.directory, **({"max_num_batched_tokens": None, "batching_mode": "dynamic"} | changes))

    def answers(self, core: EngineCore) -> list[torch.Tensor]:
        processor = load_processor(self.directory)
        for number, picture in enumerate(PICTURES):
            add(core, str(number), processor.process(picture))
        outputs = run(core)
        return [logits_of(outputs[str(number)]) for number in range(len(PICTURES))]


def add(core: EngineCore, name: str, pixels: "np.ndarray[Any, np.dtype[np.float32]]") -> None:
    shape = PictureShape(*pixels.shape)
    payload = encode_pixels(shape, pixels.tobytes())
    core.add_request(EngineRequest(request_id=name, payload=payload, payload_cost=shape.num_pixels))


GetClassifier = Callable[[str], Classifier]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> GetClassifier:
    made: dict[str, Classifier] = {}

    def get(kind: str) -> Classifier:
        if kind not in made:
            made[kind] = Classifier(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return get


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(classifier: GetClassifier, kind: str) -> None:
    ref = classifier(kind)
    core = ref.make_core()
    assert distance(ref.answers(core), ref.logits) < 1e-4
    assert isinstance(core.executor, ImageClassifyRunner)
    spread = torch.stack(ref.logits).std(dim=0)
    assert float(spread.min()) > 1e-3, "the pictures have different logits, so that a mix-up shows"


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_the_logits_of_transformers(classifier: GetClassifier, mode: str) -> None:
    ref = classifier("resnet")
    assert distance(ref.answers(ref.make_core(batching_mode=mode)), ref.logits) < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_the_same_alone_and_among_others(classifier: GetClassifier, kind: str) -> None:
    ref = classifier(kind)
    alone = ref.answers(ref.make_core(batching_mode="none"))
    for max_num_seqs in (2, 7):
        assert distance(ref.answers(ref.make_core(max_num_seqs=max_num_seqs)), alone) < 1e-5


def test_pictures_of_several_shapes_share_a_step_and_a_forward_each(tmp_path: Path) -> None:
    """A processor that neither scales nor crops, before a model that takes any size."""
    model = save_image_model("resnet", tmp_path)
    save_processor("vit", tmp_path, do_resize=False)
    pipeline, processor = open_pipeline(tmp_path, model), load_processor(tmp_path)
    core = make_core(tmp_path, max_num_batched_tokens=100_000, batching_mode="dynamic")
    assert isinstance(core.executor, ImageClassifyRunner)
    numbers: list[int] = []
    forward = core.executor._forward
    core.executor._forward = lambda pixels: (numbers.append(len(pixels)), forward(pixels))[1]  # type: ignore[method-assign]
    pictures = [draw(0, (40, 40)), draw(1, (64, 48)), draw(2, (40, 40)), draw(3, (48, 64))]
    for number, picture in enumerate(pictures):
        add(core, str(number), processor.process(picture))
    outputs = run(core)
    assert (sorted(numbers), core.stats().num_steps) == ([1, 1, 2], 1)
    for number, picture in enumerate(pictures):
        best = pipeline(picture, top_k=1, function_to_apply="none")[0]["score"]
        assert float(logits_of(outputs[str(number)]).max()) == pytest.approx(best, abs=1e-4)


def test_a_batch_closes_by_the_pixels_that_it_may_have(classifier: GetClassifier) -> None:
    ref = classifier("vit")
    core = ref.make_core(max_num_batched_tokens=2 * SIDE * SIDE, max_num_seqs=7)
    assert distance(ref.answers(core), ref.logits) < 1e-4
    assert core.stats().num_steps == 4, "seven pictures, two at a time"


def test_a_budget_below_one_picture_computes_them_one_by_one(classifier: GetClassifier) -> None:
    ref = classifier("vit")
    core = ref.make_core(max_num_batched_tokens=4, max_num_seqs=4, warmup=True)
    assert distance(ref.answers(core), ref.logits) < 1e-4
    assert core.stats().num_steps == len(PICTURES)


def test_warm_up_computes_the_largest_batch(classifier: GetClassifier) -> None:
    core = classifier("vit").make_core(warmup=True)
    assert core.longest_warmup_step_seconds > 0
    assert core.stats().num_steps == 0


def test_logits_that_are_not_finite_are_an_error_of_their_image_alone(classifier: GetClassifier) -> None:
    ref = classifier("vit")
    core, processor = ref.make_core(), load_processor(ref.directory)
    for number in range(3):
        add(core, str(number), processor.process(PICTURES[number]) * (np.float32(np.nan) if number == 1 else 1))
    outputs = run(core)
    assert [outputs[name].finish_reason for name in "012"] == ["stop", "error", "stop"]
    assert "the model's logits are not finite" in (outputs["1"].message or "")
    assert distance([logits_of(outputs["2"])], ref.logits[2:3]) < 1e-4


@pytest.mark.parametrize(
    ("changes", "activation"),
    [
        ({}, "softmax"),
        ({"problem_type": "multi_label_classification"}, "sigmoid"),
        ({"problem_type": "regression"}, "none"),
        ({"num_labels": 1}, "sigmoid"),
    ],
    ids=str,
)
def test_what_scores_are_made_by_is_read_from_the_model_s_files(
    tmp_path: Path, changes: dict[str, Any], activation: str
) -> None:
    save_image_model("vit", tmp_path, **changes)
    core = make_core(tmp_path, max_num_batched_tokens=None)
    facts = ImageFacts.read(core.facts)
    assert (core.facts.task, facts.activation, facts.shape) == ("imageclassify", activation, (3, SIDE, SIDE))
    assert (core.facts.vocab_size, core.facts.num_kv_blocks) == (0, 0)
    assert core.facts.max_num_batched_tokens == 4 * SIDE * SIDE


def test_labels_are_those_of_the_model(classifier: GetClassifier) -> None:
    assert ImageFacts.read(classifier("vit").make_core().facts).labels == ("circle", "square", "star")


@pytest.mark.parametrize(
    ("save", "task", "sentence"),
    [
        (lambda to: save_image_model("vit", to), "classify", "the model classifies images .*ViTForImageClassification"),
        (lambda to: save_image_model("vit", to), "generate", "the model classifies images .*set `task: imageclassify`"),
        (lambda to: save_classifier("bert", to), "imageclassify", "the model classifies texts .*BertForSequence"),
        (lambda to: save_tiny_model("llama", to), "imageclassify", "the model generates text .*LlamaForCausalLM"),
    ],
)
def test_a_task_that_is_not_the_model_s_is_refused_with_what_it_is(
    tmp_path: Path, save: Callable[[Path], object], task: str, sentence: str
) -> None:
    save(tmp_path)
    with pytest.raises(ConfigError, match=sentence):
        make_core(tmp_path, task=task)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "has no preprocessor_config.json: save the model's image processor"),
        ("{", "the image processor in .* cannot be used"),
        ('{"image_processor_type": "NoSuchProcessor"}', "the image processor in .* cannot be used"),
        (
            '{"image_processor_type": "ViTImageProcessor", "size": {"height": 100000, "width": 4}}',
            "size.height 100000; 1 to",
        ),
        ('{"image_processor_type": "ViTImageProcessor", "size": {"height": 0, "width": 4}}', "size.height 0; 1 to"),
        (
            '{"image_processor_type": "ViTImageProcessor", "size": {"height": 16, "width": 16}}',
            "does not take the 3 x 16",
        ),
        ('{"image_processor_type": "ViTImageProcessor", "image_mean": [0.5]}', "makes no pixels of a picture"),
        ('{"image_processor_type": "Pix2StructImageProcessor"}', "makes|cannot be used"),
    ],
)
def test_a_processor_that_cannot_be_used_is_refused(tmp_path: Path, content: str | None, sentence: str) -> None:
    save_image_model("vit", tmp_path)
    path = tmp_path / "preprocessor_config.json"
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(ModelError, match=sentence):
        make_core(tmp_path)


def test_code_beside_a_processor_is_not_run(tmp_path: Path) -> None:
    save_image_model("vit", tmp_path)
    (tmp_path / "mine.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "preprocessor_config.json").write_text('{"auto_map": {"AutoImageProcessor": "mine.Mine"}}')
    with pytest.raises(ModelError, match=r"cannot be used|does not take"):
        make_core(tmp_path)


def test_batch_statistics_are_found_out(classifier: GetClassifier) -> None:
    """Batch norm in training mode, where each image depends on the others of its batch."""
    ref = classifier("resnet")
    core = ref.make_core()
    assert isinstance(core.executor, ImageClassifyRunner)
    core.executor.model.train()
    assert distance(ref.answers(core), ref.logits) > 1e-2


def test_another_filter_for_scaling_is_found_out(classifier: GetClassifier, tmp_path: Path) -> None:
    ref = classifier("vit")
    save_processor("vit", tmp_path, resample=Image.Resampling.NEAREST)
    core, processor = ref.make_core(), load_processor(tmp_path)
    add(core, "0", processor.process(PICTURES[3]))
    assert distance([logits_of(run(core)["0"])], ref.logits[3:4]) > 1e-3
