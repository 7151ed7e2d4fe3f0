"""Runs the engine's plans on a model that generates pictures. A step computes one denoising step for each row.

A row is one picture: its latents, what the model reads of its prompt, and its own diffusers scheduler with its
timesteps. Rows of one size share a forward pass of the UNet or transformer, even at different timesteps. A row with
guidance counts twice in that pass. After a row's last step, and for a preview, the VAE decodes the latents. If a failed
step is run again, it skips the rows that are already done, so each row runs each of its timesteps once.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.config.kinds import MAX_TOKENS
from conveyor_engine.errors import ConfigError
from conveyor_engine.execution import machine
from conveyor_engine.execution.largest_step import measure_step
from conveyor_engine.execution.limits import dtype_name
from conveyor_engine.execution.models import checks
from conveyor_engine.execution.placement import Placement
from conveyor_engine.execution.runners.base import Runner
from conveyor_engine.execution.start import Progress
from conveyor_engine.execution.transfer import HostCopy, to_device
from conveyor_engine.tasks.imagegenerate.execution.checking import read_text_config
from conveyor_engine.tasks.imagegenerate.execution.families.family import Family, Inputs, Prompts
from conveyor_engine.tasks.imagegenerate.execution.loading import load_family
from conveyor_engine.tasks.imagegenerate.facts import (
    GOES_ON,
    PaintFacts,
    PaintRequest,
    Size,
    find_max_pixels,
    read_request,
)
from conveyor_engine.wire.request import ModelFacts
from conveyor_engine.wire.step import AdmittedRow, StepPlan, StepResult

# How many pictures of the model's own size, with guidance, the default budget of a step allows.
_PICTURES: Final = {"cpu": 8, "cuda": 16}


@dataclass(slots=True)
class Row:
    """A picture in the making."""

    digest: bytes  # of the request's payload and seed
    request: PaintRequest  # without the picture to edit: a row stays until another picture takes its number
    prompts: Prompts  # the prompt; with guidance the negative prompt, then the prompt
    scheduler: Any
    latents: torch.Tensor  # (1, channels, height, width)
    num_done: int = 0  # number of timesteps that are done

    @property
    def timestep(self) -> torch.Tensor:
        """The next timestep, on the host."""
        timestep: torch.Tensor = self.scheduler.timesteps[self.request.num_skipped + self.num_done]
        return timestep

    @property
    def shows_picture(self) -> bool:
        """Whether the picture is sent in its current state: as the result or as a preview."""
        num_timesteps = len(self.scheduler.timesteps) - self.request.num_skipped
        return self.num_done == num_timesteps or self.num_done in self.request.previews


class PaintRunner(Runner):
    """One pipeline on one device, ready to run after construction."""

    def __init__(self, config: EngineConfig, placement: Placement, progress: Progress) -> None:
        """Load the model. Raises ConfigError or ModelError."""
        self.device, directory = placement.device, Path(config.model)
        self._dtype = machine.choose_dtype(config.dtype, self.device, read_text_config(directory))
        about = f"device={self.device} dtype={dtype_name(self._dtype)} task=imagegenerate"
        progress(f"event=model_loading path={directory} {about}")
        self._family = load_family(directory, self._dtype, self.device)
        self._rows: dict[int, Row] = {}
        self.facts = _describe(config, self._family, self.device, self._dtype)
        scheduler = type(self._family.parts.scheduler).__name__
        progress(f"event=model_loaded size={self._family.size} scheduler={scheduler} safety_checker=none")
        self._try_smallest()
        if self.device.type == "cuda":
            self._measure(progress)

    @property
    def extra_warmup_tokens(self) -> Sequence[int]:
        """Return the cost of the largest picture, if a step may cost as much."""
        return (min(self.facts.max_model_len, self.facts.max_num_batched_tokens),)

    def begin(self, plan: StepPlan) -> Callable[[object], Callable[[], StepResult]]:
        """Begin a step; on a GPU this only launches its work.

        The returned `Sample` ignores its masks, and its `Read` waits for the pictures.
        """
        with torch.inference_mode():
            self._take_new(plan)
            rows, places = [self._rows[row] for row in plan.rows], _find_timesteps(plan)
            for group in _group(row for row, place in zip(rows, places, strict=True) if row.num_done == place):
                self._denoise(group)
            done = (row for row, place in zip(rows, places, strict=True) if row.num_done == place + 1)
            shown = [row for row in done if row.shows_picture]
            groups = list(_group(shown))
            pictures = [self._draw(group) for group in groups]
            copy = HostCopy(torch.stack([row.latents.isfinite().all() for row in rows]), *pictures)

        def read() -> StepResult:
            finite, *made = copy.wait()
            payloads = [GOES_ON if is_finite else b"" for is_finite in finite.tolist()]
            numbers = {id(row): number for number, row in enumerate(rows)}
            for group, drawn in zip(groups, made, strict=True):
                for row, picture in zip(group, drawn.numpy(), strict=True):
                    if payloads[numbers[id(row)]]:
                        payloads[numbers[id(row)]] = picture.tobytes()
            return StepResult(plan.number, [], payloads=payloads)

        return lambda _: read

    def _take_new(self, plan: StepPlan) -> None:
        """Create the rows that the plan admits, except those that a failed run of the same step already created."""
        computed = dict(zip(plan.rows, plan.num_computed_tokens, strict=True))
        new = [
            each
            for each in plan.admitted
            if not computed[each.row] or each.row not in self._rows or self._rows[each.row].digest != _digest(each)
        ]
        if not new:
            return
        requests = [read_request(each.payload) for each in new]
        for each, request, prompts in zip(new, requests, self._read_prompts(requests), strict=True):
            assert each.sampling is not None
            self._rows[each.row] = self._make_row(_digest(each), request, each.sampling.seed, prompts)

    def _read_prompts(self, requests: Sequence[PaintRequest]) -> Iterator[Prompts]:
        """Yield what the model reads of each request's prompt; with guidance of the negative prompt, then the prompt.

        Each text encoder computes all prompts in one forward pass.
        """
        empty, packed, zeroed = self._family.parts.empty_tokens, [], []
        for request in requests:
            negative = [request.packed_negative or empty] if request.has_guidance else []
            zeroed += [self._family.zeroes_empty and not request.packed_negative] * len(negative) + [False]
            packed += [*negative, request.packed_tokens]
        tokens = [
            to_device(np.array([np.frombuffer(each, dtype=np.uint32) for each in column], dtype=np.int64), self.device)
            for column in zip(*packed, strict=True)
        ]
        kept = ~to_device(np.array(zeroed), self.device)
        read = (each.to(self._dtype) for each in self._family.read_prompts(tokens))
        hidden, pooled = (torch.where(kept.view(-1, *[1] * (each.dim() - 1)), each, 0) for each in read)
        sizes = [2 if request.has_guidance else 1 for request in requests]
        return map(Prompts, torch.split(hidden, sizes), torch.split(pooled, sizes))

    def _make_row(self, digest: bytes, request: PaintRequest, seed: int, prompts: Prompts) -> Row:
        """Create a row with random latents from the seed. An edit mixes them with those of its picture."""
        family, (width, height) = self._family, request.size
        scheduler = family.copy_scheduler(request.num_inference_steps, request.size)
        shape = 1, family.parts.vae.config.latent_channels, height // family.factor, width // family.factor
        generator = torch.Generator().manual_seed(seed)  # on the host, so that all devices get the same noise
        drawn = self._encode(request, generator) if request.image else None
        noise = torch.randn(shape, generator=generator, dtype=self._dtype)
        if drawn is None:
            noise = family.scale_noise(scheduler, noise)
        latents = to_device(noise.float().numpy(), self.device).to(self._dtype)
        if drawn is not None:
            latents = family.add_noise(scheduler, drawn, latents, request.num_skipped)
        return Row(digest, msgspec.structs.replace(request, image=b""), prompts, scheduler, latents)

    def _encode(self, request: PaintRequest, generator: torch.Generator) -> torch.Tensor:
        """Return the latents of the picture to edit."""
        width, height = request.size
        pixels = np.frombuffer(request.image, dtype=np.uint8).reshape(1, height, width, 3)
        whole = to_device(pixels.copy(), self.device).permute(0, 3, 1, 2).float() / 255 * 2 - 1
        return self._family.encode(whole.to(self._family.parts.vae.dtype), generator).to(self._dtype)

    def _denoise(self, rows: Sequence[Row]) -> None:
        """Run the next timestep of each of these pictures. All have the same size."""
        counts = [len(row.prompts.hidden) for row in rows]
        inputs = [self._family.scale_input(row.scheduler, row.latents, row.timestep) for row in rows]
        sample = torch.cat([each.expand(count, -1, -1, -1) for each, count in zip(inputs, counts, strict=True)])
        numbers = ([float(row.timestep) for row in rows], [row.request.guidance_scale for row in rows])
        timesteps, guidance = (to_device(np.repeat(each, counts).astype(np.float32), self.device) for each in numbers)
        prompts = Prompts(*map(torch.cat, zip(*(row.prompts for row in rows), strict=True)))
        predicted = self._family.predict(Inputs(sample, timesteps, prompts, guidance, rows[0].request.size))
        for row, noise in zip(rows, torch.split(predicted, counts), strict=True):
            if row.request.has_guidance:
                without, with_prompt = noise.chunk(2)
                noise = without + row.request.guidance_scale * (with_prompt - without)
            row.latents = row.scheduler.step(noise, row.timestep, row.latents, return_dict=False)[0]
            row.num_done += 1

    def _draw(self, rows: Sequence[Row]) -> torch.Tensor:
        """Decode the latents of rows of one size. Return the pictures, uint8 (pictures, height, width, 3).

        The VAE needs much more memory than the UNet. So it decodes at most as many pixels at once as the largest
        picture has.
        """
        number = max(1, find_max_pixels(self._family.size) // rows[0].request.size.num_pixels)
        return torch.cat([self._decode(rows[first : first + number]) for first in range(0, len(rows), number)])

    def _decode(self, rows: Sequence[Row]) -> torch.Tensor:
        latents = torch.cat([row.latents for row in rows])
        pixels = self._family.decode(latents.to(self._family.parts.vae.dtype))
        pixels = (pixels * 0.5 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).float()
        made: torch.Tensor = (pixels * 255).round().to(torch.uint8).contiguous()
        return made

    def _try_smallest(self) -> None:
        """Make and edit the smallest picture. Raises ModelError if the parts do not fit each other."""
        smallest = self._build(Size(self._family.multiple, self._family.multiple))
        edit = msgspec.structs.replace(smallest, image=bytes(3 * smallest.size.num_pixels))
        checks.run_once("the model cannot make a picture", lambda: self._run_alone([smallest, edit]))

    def _measure(self, progress: Progress) -> None:
        """Run the largest step. Raises ModelError if the step and the weights do not fit into memory together."""
        size, facts = self._family.size, self.facts
        rows = 2 if self._family.layout.guides else 1
        number = max(1, min(facts.max_num_seqs, facts.max_num_batched_tokens // (rows * size.num_pixels)))
        what, settings = f"{number} pictures of {size}", "`max_num_seqs` or `max_num_batched_tokens`"
        requests = [self._build(size)] * number
        step_bytes = measure_step(self.device, what, settings, lambda: self._run_alone(requests))
        progress(f"event=largest_step_fits mib={step_bytes / 2**20:.0f}")

    def _build(self, size: Size) -> PaintRequest:
        empty = self._family.parts.empty_tokens
        return PaintRequest(
            size=size,
            num_inference_steps=1,
            guidance_scale=2.0,
            has_guidance=self._family.layout.guides,
            packed_tokens=empty,
        )

    def _run_alone(self, requests: Sequence[PaintRequest]) -> None:
        """Run the first step of these requests of one size, and decode their pictures. Existing rows are unaffected."""
        with torch.inference_mode():
            prompts = self._read_prompts(requests)
            rows = [self._make_row(b"", request, 0, each) for request, each in zip(requests, prompts, strict=True)]
            self._denoise(rows)
            self._draw(rows)


def _digest(admitted: AdmittedRow) -> bytes:
    assert admitted.sampling is not None
    digest = sha256(admitted.sampling.seed.to_bytes(8, "big"))
    digest.update(admitted.payload)  # megabytes, if it is an edit
    return digest.digest()


def _find_timesteps(plan: StepPlan) -> list[int]:
    """Return the number of the timestep that each row computes.

    If the plan is run again after a failure, a row may already have computed its timestep.
    """
    return [computed // cost for computed, cost in zip(plan.num_computed_tokens, plan.num_tokens, strict=True)]


def _group(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Yield the rows of each size."""
    groups: dict[Size, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.request.size, []).append(row)
    yield from groups.values()


def _describe(config: EngineConfig, family: Family, device: torch.device, dtype: torch.dtype) -> ModelFacts:
    max_side = family.max_side
    facts = PaintFacts(
        size=family.size,
        multiple=family.multiple,
        max_pixels=min(find_max_pixels(family.size), max_side**2),
        max_side=max_side,
        empty_tokens=family.parts.empty_tokens,
        nums_forwards=family.count_forwards(),
        num_steps=family.layout.num_steps,
        guidance=family.layout.guidance,
        guides=family.layout.guides,
        strength=family.layout.strength,
        rounds_up=family.layout.is_flow,
    )
    own_cost = facts.rows * facts.size.num_pixels
    budget = config.max_num_batched_tokens or min(MAX_TOKENS, _PICTURES[device.type] * own_cost)
    if budget < own_cost:
        raise ConfigError(
            f"`max_num_batched_tokens` is {budget}, but a step of one picture of {family.size} with guidance computes "
            f"{own_cost} pixels; raise it"
        )
    return ModelFacts(
        task="imagegenerate",
        max_model_len=facts.rows * facts.max_pixels,
        dtype=dtype_name(dtype),
        device=str(device),
        attention_backend="model",
        num_kv_blocks=0,
        block_size=config.block_size,
        max_num_seqs=config.choose_num_seqs(),
        max_num_batched_tokens=budget,
        of_task=facts.encode(),
    )
