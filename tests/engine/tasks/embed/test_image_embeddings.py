"""Vectors of images and texts equal transformers' within 1e-4, in float32, whatever they are batched with."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.dual_models import CONTEXT_TOKENS, KINDS, SIZE, embed_image, embed_text, save_dual_model
from tests.engine.embedding_cores import distance, make_core, run, vector_of
from tests.engine.image_models import SIDE, draw, save_processor

from conveyor_engine.errors import ConfigError, ModelError
from conveyor_engine.images.processor import load_processor
from conveyor_engine.loop.core import EngineCore
from conveyor_engine.tasks.embed.execution.image_runner import DualRunner
from conveyor_engine.tasks.embed.facts import EmbeddingFacts, PictureFacts, PoolingParams
from conveyor_engine.wire.request import EngineRequest, FinishReason, ModelFacts

PICTURES = [draw(number, size) for number, size in enumerate(((60, 40), (32, 32), (33, 100), (1, 1), (200, 150)))]
END = 0
# With the token that ends a text, twice, not at the end, and without it.
TEXTS = [[3, 9, 8, END], [7, 7, END, END], [4, END, 5], [9] * (CONTEXT_TOKENS - 1) + [END], [9, 11, 10]]
MODES = ("none", "static", "dynamic", "continuous")


class Dual:
    """A tiny model, and transformers' vectors of all pictures and texts, each computed alone."""

    def __init__(self, kind: str, directory: Path) -> None:
        self.directory, self.kind = directory, kind
        self.model = save_dual_model(kind, directory)
        assert self.model.config.text_config.eos_token_id == END
        of_pictures = [embed_image(self.model, directory, picture) for picture in PICTURES]
        self.vectors = of_pictures + [embed_text(self.model, text) for text in TEXTS]

    def make_core(self, **changes: Any) -> EngineCore:
        return make_core(self.directory, **({"max_num_batched_tokens": 70, "batching_mode": "dynamic"} | changes))

    def answers(self, core: EngineCore) -> list[torch.Tensor]:
        """In turns a picture and a text, so that batches have both."""
        processor = load_processor(self.directory)
        for number, (picture, text) in enumerate(zip(PICTURES, TEXTS, strict=True)):
            add_pixels(core, f"p{number}", processor.process(picture).tobytes())
            payload = PoolingParams().encode()
            core.add_request(EngineRequest(request_id=f"t{number}", prompt_token_ids=text, payload=payload))
        outputs = run(core)
        return [vector_of(outputs[f"{what}{number}"]) for what in "pt" for number in range(len(PICTURES))]


def pictures_of(facts: ModelFacts) -> PictureFacts:
    pictures = EmbeddingFacts.read(facts).pictures
    assert pictures is not None
    return pictures


def add_pixels(core: EngineCore, name: str, pixels: bytes) -> None:
    payload = PoolingParams(pixels=pixels).encode()
    cost = pictures_of(core.facts).num_tokens
    core.add_request(EngineRequest(request_id=name, payload=payload, payload_cost=cost))


GetDual = Callable[[str], Dual]


@pytest.fixture(scope="module")
def dual(tmp_path_factory: pytest.TempPathFactory) -> GetDual:
    made: dict[str, Dual] = {}

    def get(kind: str) -> Dual:
        if kind not in made:
            made[kind] = Dual(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return get


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_vectors_are_those_of_transformers_in_each_mode(dual: GetDual, kind: str, mode: str) -> None:
    ref = dual(kind)
    core = ref.make_core(batching_mode=mode)
    assert isinstance(core.executor, DualRunner)
    assert distance(ref.answers(core), ref.vectors) < 1e-4
    spread = torch.pdist(torch.stack(ref.vectors))
    assert float(spread.min()) > 1e-2, "all vectors differ, so that a mix-up shows"


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_are_the_same_alone_and_among_others(dual: GetDual, kind: str) -> None:
    ref = dual(kind)
    alone = ref.answers(ref.make_core(batching_mode="none"))
    core = ref.make_core(max_num_seqs=10, max_num_batched_tokens=1000)
    assert distance(ref.answers(core), alone) < 1e-5
    assert core.stats().num_steps == 1


def test_a_batch_closes_by_the_tokens_of_pictures(dual: GetDual) -> None:
    ref = dual("clip")
    core = ref.make_core(max_num_batched_tokens=34, max_num_seqs=10)
    processor = load_processor(ref.directory)
    for number, picture in enumerate(PICTURES):
        add_pixels(core, str(number), processor.process(picture).tobytes())
    outputs = run(core)
    assert distance([vector_of(outputs[str(number)]) for number in range(5)], ref.vectors[:5]) < 1e-4
    assert core.stats().num_steps == 3, "of 17 tokens each, two at a time"


@pytest.mark.parametrize(("kind", "size", "num_tokens", "padded"), [("clip", SIZE, 17, 0), ("siglip", 32, 16, 24)])
def test_facts_are_those_of_the_model(dual: GetDual, kind: str, size: int, num_tokens: int, padded: int) -> None:
    facts = dual(kind).make_core().facts
    assert EmbeddingFacts.read(facts) == EmbeddingFacts(size=size, pictures=pictures_of(facts), padded_tokens=padded)
    assert pictures_of(facts) == PictureFacts((3, SIDE, SIDE), num_tokens)  # type: ignore[arg-type]
    assert (facts.task, facts.max_model_len, facts.vocab_size) == ("embed", CONTEXT_TOKENS, 384)


def test_warm_up_computes_pictures_and_texts(dual: GetDual) -> None:
    core = dual("clip").make_core(warmup=True)
    assert core.longest_warmup_step_seconds > 0
    assert core.stats().num_steps == 0


def test_a_vector_that_is_not_finite_is_an_error_of_its_picture_alone(dual: GetDual) -> None:
    ref = dual("clip")
    core, processor = ref.make_core(), load_processor(ref.directory)
    add_pixels(core, "broken", (processor.process(PICTURES[1]) * float("nan")).astype("float32").tobytes())
    add_pixels(core, "whole", processor.process(PICTURES[0]).tobytes())
    outputs = run(core)
    assert outputs["broken"].finish_reason is FinishReason.ERROR
    assert "the model's vector is not finite" in (outputs["broken"].message or "")
    assert distance([vector_of(outputs["whole"])], ref.vectors[:1]) < 1e-4


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ({"attention_backend": "torch"}, "`attention_backend: torch` is set, but this model has its own attention"),
        ({"max_model_len": 100}, "made for at most 24 tokens"),
    ],
    ids=str,
)
def test_settings_that_do_not_apply_are_refused(dual: GetDual, setting: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        dual("clip").make_core(**setting)


def change_processor(directory: Path, **changes: Any) -> None:
    save_processor("vit", directory, **changes)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda at: change_processor(at, size={"height": 16, "width": 16}), "does not take the 3 x 16 x 16"),
        (lambda at: change_processor(at, do_resize=False), "makes pictures of several shapes"),
        (lambda at: (at / "preprocessor_config.json").unlink(), "has no preprocessor_config.json"),
        (lambda at: (at / "modules.json").write_text("[]"), "has modules.json, whose steps this engine lacks"),
        (
            lambda at: (at / "config.json").write_text(
                (at / "config.json").read_text().replace('"model_type": "clip"', '"model_type": "clipseg"')
            ),
            r"clipseg has no encoder of images and texts \(of the kinds clip and siglip\)",
        ),
    ],
)
def test_a_model_that_would_be_computed_wrongly_is_refused(
    tmp_path: Path, change: Callable[[Path], object], sentence: str
) -> None:
    save_dual_model("clip", tmp_path)
    change(tmp_path)
    with pytest.raises(ModelError, match=sentence):
        make_core(tmp_path)


def test_a_siglip_without_its_padding_is_found_out(dual: GetDual) -> None:
    """The comparison fails if texts are padded by another token."""
    ref = dual("siglip")
    core = ref.make_core()
    assert isinstance(core.executor, DualRunner)
    core.executor._pad_token = 1
    assert distance(ref.answers(core), ref.vectors) > 1e-2


def test_a_clip_that_takes_the_padding_for_the_end_is_found_out(dual: GetDual) -> None:
    ref = dual("clip")
    core = ref.make_core()
    assert isinstance(core.executor, DualRunner)
    core.executor._padded_tokens = CONTEXT_TOKENS
    core.executor._pad_token = END
    assert distance(ref.answers(core), ref.vectors) > 1e-2
