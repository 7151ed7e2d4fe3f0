"""Checks that prompts with images give the greedy tokens of transformers' `generate` (fp32), in every situation."""

import inspect
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tests.engine.references import run, tokens_of
from tests.engine.seeing_models import FAMILIES, make_image, save_seeing_model
from transformers import LlavaModel, PreTrainedModel

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.execution import native
from conveyor_engine.execution.attention.backend import AttentionMetadata, AttentionSpec
from conveyor_engine.execution.attention.cpu_native import CpuNative
from conveyor_engine.execution.models.adapt import _find_places
from conveyor_engine.execution.placement import open_placement
from conveyor_engine.execution.start import RunnerStart
from conveyor_engine.loop.core import EngineCore
from conveyor_engine.tasks.generate.chat_pictures import ChatPictures, load_chat_pictures
from conveyor_engine.tasks.generate.execution.runner import GenerateRunner
from conveyor_engine.tasks.generate.execution.sight import Sight, unpack
from conveyor_engine.wire.pictures import PictureSpan, PlacedPicture, encode_pictures
from conveyor_engine.wire.request import EngineRequest, SamplingParams

pytestmark = pytest.mark.skipif(
    "mm_encoder_outputs" not in inspect.signature(LlavaModel.forward).parameters,
    reason="models of this transformers take no encoded images",
)
MAX_TOKENS = 12
# States and axes; features of deeper layers; images in several parts; images whose tokens see each other.
QUICK = ("qwen3_5", "qwen3_vl", "idefics3", "gemma3")
WHOLE = ("gemma3", "gemma4_large")  # the tokens of an image see each other, in all layers and in those with a window
KINDS = [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in FAMILIES]
Prompt = tuple[list[int], list[PlacedPicture]]


class SeeingReference:
    """A model, prompts with none to three images, and the answers of `generate`."""

    def __init__(self, kind: str, directory: Path) -> None:
        self.directory = directory
        self.model: Any = save_seeing_model(kind, directory)
        self.reader = load_chat_pictures(directory)
        self.axis = 1 if kind in ("idefics3", "smolvlm") else 0  # along which `generate` gets several images
        is_padded = self.axis or kind in ("llava_next", "mistral3", "ministral3", "pixtral")  # images of one batch
        sizes = [(100, 60)] * 3 if is_padded else [(100, 60), (60, 100), (50, 120)]
        images = [make_image(*size, seed) for seed, size in enumerate(sizes)]
        self.prompts = [self.make_prompt(images[:number], number) for number in range(4)]
        self.answers = [self.generate(*prompt) for prompt in self.prompts]
        # Of a small step, for chunks. A step must have room for an image that is computed whole.
        spans = [each.span for _, placed in self.prompts for each in placed]
        self.max_model_len = max(224, *(len(tokens) + MAX_TOKENS for tokens, _ in self.prompts))
        self.step_tokens = max(13, *(each.end - each.start for each in spans)) if kind in WHOLE else 13

    def make_prompt(self, images: Sequence[Image.Image], seed: int) -> Prompt:
        """Return random tokens with images between them."""
        numbers = random.Random(seed)
        tokens: list[int] = []
        placed: list[PlacedPicture] = []
        for image in images:
            tokens += [numbers.randrange(150, 390) for _ in range(numbers.randrange(2, 9))]
            picture, text = self.reader.read(image)
            shown = self.reader.encode(text)
            places = [len(tokens) + index for index, token in enumerate(shown) if token == self.reader.place_id]
            tokens += shown
            placed.append(PlacedPicture(PictureSpan(places[0], places[-1] + 1, picture.digest()), picture))
        return [*tokens, *(numbers.randrange(150, 390) for _ in range(5))], placed

    def generate(self, tokens: list[int], placed: list[PlacedPicture]) -> list[int]:
        """Return what transformers continues the prompt with, from pixels."""
        input_ids = torch.tensor([tokens])
        inputs: dict[str, Any] = {}
        for name in placed[0].picture.tensors if placed else ():
            inputs[name] = torch.cat([unpack(each.picture, name) for each in placed], self.axis)
        types = (input_ids == self.reader.place_id).int()
        known = inspect.signature(self.model.forward).parameters
        inputs |= {name: types for name in ("mm_token_type_ids", "token_type_ids") if placed and name in known}
        if hasattr(self.model.base_model, "rope_deltas"):
            self.model.base_model.rope_deltas = None  # of an earlier prompt
        answer = self.model.generate(
            input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=MAX_TOKENS, do_sample=False,
            pad_token_id=0, eos_token_id=None, **inputs,
        )  # fmt: skip
        answered: list[int] = answer[0, len(tokens) :].tolist()
        return answered

    def make_core(self, **changes: Any) -> EngineCore:
        values: dict[str, Any] = {
            "model": str(self.directory), "device": "cpu", "dtype": "float32", "max_num_seqs": 4,
            "max_num_batched_tokens": self.step_tokens, "max_model_len": self.max_model_len,
            "num_kv_blocks": 64, "warmup": False,
            "batching_window_seconds": 0.0 if changes.get("batching_mode") in ("static", "dynamic") else None,
        }  # fmt: skip
        config = EngineConfig(**(values | changes))
        self.lines: list[str] = []
        self.runner = GenerateRunner(config, open_placement(config), self.lines.append)
        return EngineCore(config, self.runner)


def add(core: EngineCore, request_id: str, prompt: Prompt, adapter: int = 0) -> None:
    tokens, placed = prompt
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
    spans = [each.span for each in placed]
    core.add_request(
        EngineRequest(
            request_id=request_id,
            prompt_token_ids=tokens,
            params=params,
            payload=encode_pictures(placed),
            pictures=spans,
            adapter=adapter,
        )
    )


def answers(core: EngineCore, prompts: Sequence[Prompt]) -> list[list[int]]:
    for number, prompt in enumerate(prompts):
        add(core, str(number), prompt)
    outputs = run(core)
    return [tokens_of(outputs[str(number)]) for number in range(len(prompts))]


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], SeeingReference]:
    made: dict[str, SeeingReference] = {}

    def get(kind: str) -> SeeingReference:
        if kind not in made:
            made[kind] = SeeingReference(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return get


GetSeeing = Callable[[str], SeeingReference]


@pytest.mark.parametrize("kind", KINDS)
def test_images_in_chunks_give_the_tokens_of_generate(seeing: GetSeeing, kind: str) -> None:
    of_kind = seeing(kind)
    assert len({token for answer in of_kind.answers for token in answer}) > 8
    assert answers(of_kind.make_core(), of_kind.prompts) == of_kind.answers


@pytest.mark.parametrize("mode", ["none", "static", "dynamic", "continuous"])
@pytest.mark.parametrize("kind", ["qwen3_vl", *(pytest.param(kind, marks=pytest.mark.slow) for kind in FAMILIES)])
def test_images_give_them_in_every_mode(seeing: GetSeeing, kind: str, mode: str) -> None:
    of_kind = seeing(kind)
    core = of_kind.make_core(batching_mode=mode, max_num_batched_tokens=512)
    assert answers(core, of_kind.prompts) == of_kind.answers


@pytest.mark.parametrize("kind", KINDS)
def test_preempted_requests_with_images_give_them(seeing: GetSeeing, kind: str) -> None:
    of_kind = seeing(kind)
    longest = max(len(tokens) for tokens, _ in of_kind.prompts) + MAX_TOKENS
    blocks = {"block_size": 4, "num_kv_blocks": -(-longest // 4) + 1, "attention_backend": "torch"}
    core = of_kind.make_core(max_model_len=longest, max_num_batched_tokens=64, **blocks)
    prompts, expected = of_kind.prompts * 2, of_kind.answers * 2
    assert answers(core, prompts) == expected
    assert core.stats().num_preemptions > 0


@pytest.mark.parametrize("kind", ["qwen2_5_vl", *(pytest.param(kind, marks=pytest.mark.slow) for kind in WHOLE)])
def test_a_prefix_is_shared_with_the_same_image_only(seeing: GetSeeing, kind: str) -> None:
    of_kind = seeing(kind)
    core = of_kind.make_core(block_size=4, attention_backend="torch")
    first, *others = (of_kind.make_prompt([make_image(100, 60, seed)], 1) for seed in range(1, 12))
    answer_to_first = of_kind.generate(*first)
    other = next(prompt for prompt in others if of_kind.generate(*prompt) != answer_to_first)
    assert first[0] == other[0]
    expected = [answer_to_first, of_kind.generate(*other)]
    hits = []
    for prompt, answer in ((first, expected[0]), (other, expected[1]), (first, expected[0])):
        before = core.stats().prefix_cache_hit_tokens
        assert answers(core, [prompt]) == [answer]
        hits.append(core.stats().prefix_cache_hit_tokens - before)
    assert 0 <= hits[1] <= first[1][0].span.start
    assert hits[2] > first[1][0].span.end - 4


def test_an_image_is_encoded_once_for_its_chunks_and_requests(
    seeing: GetSeeing, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_kind = seeing("qwen2_5_vl")
    core = of_kind.make_core(prefix_caching=False)
    encoded: list[Any] = []
    encode = Sight.encode

    def count(sight: Sight, picture: Any) -> Any:
        encoded.append(picture)
        return encode(sight, picture)

    monkeypatch.setattr(Sight, "encode", count)
    assert answers(core, [of_kind.prompts[1]] * 3) == [of_kind.answers[1]] * 3
    assert len(encoded) == 1


def test_features_are_kept_within_their_bytes(seeing: GetSeeing) -> None:
    of_kind = seeing("qwen2_5_vl")
    core = of_kind.make_core(prefix_caching=False)
    sight = of_kind.runner._sight
    assert sight is not None
    sight._kept_bytes = 2000  # less than two images
    assert answers(core, of_kind.prompts) == of_kind.answers
    assert len(sight._features) == 1
    assert sight._num_bytes == sum(part.nbytes for kept in sight._features.values() for part in kept)


def test_the_memory_of_the_largest_image_is_measured_at_the_start_and_left_free(
    seeing: GetSeeing, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_kind = seeing("qwen2_5_vl")
    encode, needed = Sight.encode, 256 * 2**20  # more than malloc keeps of what was freed before
    largest = of_kind.reader.read_largest()

    def need(sight: Sight, picture: Any) -> Any:
        if picture == largest:
            torch.ones(needed, dtype=torch.uint8)
        return encode(sight, picture)

    left: list[int] = []
    allocate = RunnerStart.allocate_cache
    monkeypatch.setattr(Sight, "encode", need)
    monkeypatch.setattr(RunnerStart, "allocate_cache", lambda *all_: (left.append(all_[4]), allocate(*all_))[1])
    of_kind.make_core(warmup=True)
    lines = [line for line in of_kind.lines if "largest_image" in line]
    assert re.fullmatch(
        r"event=largest_image_begun mib=\d+\nevent=largest_image_encoded seconds=[\d.]+ mib=\d+", "\n".join(lines)
    )
    of_kind.make_core(warmup=False)
    assert not any("largest_image" in line for line in of_kind.lines)
    assert left[0] - left[1] > needed * 0.9


@pytest.mark.parametrize("kind", ["gemma4", "qwen2_5_vl"])
def test_a_sampled_placeholder_has_the_embedding_that_it_has_without_images(seeing: GetSeeing, kind: str) -> None:
    """A random model samples the placeholder's token. It is no place for a feature, also not beside images."""
    of_kind = seeing(kind)
    place = of_kind.reader.place_id
    strays: list[Prompt] = [([5, place, 7 + number, 9, place, place], []) for number in range(8)]
    expected = [of_kind.generate(*stray) for stray in strays]
    core = of_kind.make_core(max_num_seqs=12, max_num_batched_tokens=1024, prefix_caching=False)
    assert answers(core, [*of_kind.prompts, *strays]) == [*of_kind.answers, *expected]


def test_a_model_whose_images_would_be_read_wrongly_is_served_without_them(
    seeing: GetSeeing, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_kind = seeing("qwen2_5_vl")
    lay = Sight._lay_positions
    monkeypatch.setattr(Sight, "_lay_positions", lambda sight, layout: lay(sight, layout) * 0 + layout.positions)
    core = of_kind.make_core()
    assert core.facts.image_place is None
    assert "other answers for images" in core.facts.no_images_because
    assert answers(core, of_kind.prompts[:1]) == of_kind.answers[:1]


@pytest.mark.skipif(native.why_missing() is not None, reason=f"needs the compiled kernels: {native.why_missing()}")
def test_attention_to_later_tokens_of_an_image_runs_before_requests_so_that_none_waits_for_its_compilation(
    seeing: GetSeeing, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers: list[int] = []
    attend = CpuNative.attend

    def record(
        backend: CpuNative, spec: AttentionSpec, query: torch.Tensor, metadata: AttentionMetadata, *others: Any
    ) -> Any:
        layers.extend([spec.layer] if metadata.ends_of(spec) is not None else [])
        return attend(backend, spec, query, metadata, *others)

    monkeypatch.setattr(CpuNative, "attend", record)
    seeing("gemma3").make_core(attention_backend="native")
    assert sorted(layers) == [0, 1, 2]
    layers.clear()
    seeing("qwen3_vl").make_core(attention_backend="native")
    assert layers == []


def test_a_model_without_a_processor_is_served_without_its_encoders(tmp_path: Path) -> None:
    kind = "qwen2_5_vl"
    model: PreTrainedModel = save_seeing_model(kind, tmp_path)
    for name in ("preprocessor_config.json", "processor_config.json"):
        (tmp_path / name).unlink()
    config = EngineConfig(model=str(tmp_path), device="cpu", dtype="float32", num_kv_blocks=16, max_model_len=64)
    runner = GenerateRunner(config, open_placement(config))
    assert runner.facts.image_place is None
    assert runner.model.model.visual is None
    assert model.model.visual is not None


def test_a_processor_is_loaded_without_the_model_s_code(tmp_path: Path) -> None:
    save_seeing_model("llava", tmp_path)
    reader: ChatPictures = load_chat_pictures(tmp_path)
    picture, text = reader.read(make_image(60, 60, 1))
    assert text == reader.mark * picture.num_places
    assert reader.read(make_image(60, 60, 2))[0].digest() != picture.digest()
    assert len({picture.digest(salt) for salt in (None, "", "a", "b")}) == 4, "salts share no features"


def test_no_adapter_changes_the_parts_that_compute_images(seeing: GetSeeing) -> None:
    of_kind = seeing("llava")
    of_kind.make_core()
    assert any("multi_modal_projector" in name for name, _ in of_kind.runner.model.named_modules())
    places = list(dict(_find_places(of_kind.runner.model)))
    assert places
    assert not [path for path in places if "multi_modal_projector" in path or "vision_tower" in path]
