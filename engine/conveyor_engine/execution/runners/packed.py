"""Base class of the runners of encoders. A step computes whole prompts, packed, in one forward and returns payloads.

Like `generate`, a runner implements the protocol `loop.executor` for one device. It keeps nothing between steps: no KV
cache, no rows. Each subclass turns the hidden states into a payload for each prompt.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.errors import ConfigError
from conveyor_engine.execution import machine
from conveyor_engine.execution.attention.interface import Probe
from conveyor_engine.execution.attention.packed import choose_packed
from conveyor_engine.execution.largest_step import too_large
from conveyor_engine.execution.limits import choose_max_model_len, find_context
from conveyor_engine.execution.models import alone
from conveyor_engine.execution.models.packing import find_first_position
from conveyor_engine.execution.models.probe import run_probe
from conveyor_engine.execution.models.quantized.deferred import read_weights
from conveyor_engine.execution.runners.base import Runner
from conveyor_engine.execution.start import RunnerStart
from conveyor_engine.execution.transfer import HostCopy, to_device
from conveyor_engine.wire.step import AdmittedRow, StepPlan, StepResult

_ATTENTION = "packed"


class PackedRunner(Runner, ABC):
    """One encoder on one device, ready to run after construction."""

    def __init__(self, start: RunnerStart, encoder: PreTrainedModel, longest: int | None, of_task: bytes) -> None:
        """Check the loaded encoder and replace its layers. Raises ConfigError or ModelError.

        longest: the limit on a prompt's tokens in the model's files; None: the files have no limit.
        """
        self.device, self.model = start.device, encoder
        self._is_alone = not encoder._can_set_attn_implementation()
        if self._is_alone:
            self.is_causal, self._first_position = False, alone.find_first_position(encoder)
            read_weights(encoder)
            start.progress(f"event=model_keeps_its_code class={type(encoder).__name__}")
        else:
            probe = run_probe(encoder, Probe(runs_bidirectional=True), self.device)
            self.is_causal = probe.is_causal
            self._first_position = find_first_position(encoder)
            self._pack = choose_packed(start.config.attention_backend, self.device, start.dtype)
            start.fuse(encoder, len(probe.shapes))
        positions = find_context(start.model_config)
        usable = None if positions is None else positions - self._first_position
        limit = min((limit for limit in (usable, longest) if limit is not None), default=None)
        self.facts = start.facts(
            encoder,
            max_model_len=choose_max_model_len(start.config, limit),
            attention_backend=_ATTENTION,
            of_task=of_task,
        )

    @abstractmethod
    def _compute(self, prompts: Sequence[AdmittedRow]) -> list[torch.Tensor]:
        """Compute the prompts' results on the device, in the prompts' order: at least one tensor."""

    @abstractmethod
    def _finish(self, computed: Sequence[npt.NDArray[Any]], prompts: Sequence[AdmittedRow]) -> Iterator[bytes]:
        """Yield the payload of each prompt, computed on the host; empty if the result is not finite."""

    def find_step_bytes(
        self, start: RunnerStart, payload: bytes = b"", num_logits: int = 0, result_bytes: int = 0, more_tokens: int = 0
    ) -> int:
        """Return the memory of the largest step. Raises ModelError if it does not fit.

        payload: of each of its requests. num_logits: tokens whose logits are in memory at once. result_bytes: of the
        largest results, which the step that is measured does not have. more_tokens: what a row may add to its prompt.
        """
        facts, settings = self.facts, "`max_num_batched_tokens` or `max_model_len`"
        settings = f"{settings}, or `max_num_seqs`" if result_bytes else settings
        longest = facts.max_model_len  # a prompt of this length may be a step of its own
        num_tokens = max(longest, min(facts.max_num_batched_tokens, facts.max_num_seqs * (longest + more_tokens)))
        lengths = [min(longest, num_tokens - first) for first in range(0, num_tokens, longest)]
        prompts = [AdmittedRow.of(row, [0] * length, [], None, payload) for row, length in enumerate(lengths)]
        step_bytes = start.find_step_bytes(
            self.model, num_tokens, settings, lambda: self._compute(prompts), num_logits=num_logits
        )
        step_bytes += result_bytes
        if step_bytes > machine.free_memory_bytes(self.device):
            raise too_large(f"{num_tokens} tokens", settings)
        return step_bytes

    def begin(self, plan: StepPlan) -> Callable[[object], Callable[[], StepResult]]:
        """Begin a step, which computes the whole prompt of each row in the plan. No row samples.

        On a GPU this only launches the work. Call the returned function, and then the function that it returns: the
        second call waits for the results.
        """
        brought = {row.row: row for row in plan.admitted}
        prompts = [brought[row] for row in plan.rows]
        with torch.inference_mode():
            copy = HostCopy(*self._compute(prompts))

        def read() -> StepResult:
            computed = [tensor.numpy() for tensor in copy.wait()]
            return StepResult(plan.number, [], payloads=list(self._finish(computed, prompts)))

        return lambda _: read

    def _encode(
        self,
        prompts: Sequence[Sequence[int]],
        token_types: npt.NDArray[np.int64] | None = None,
        nums_keys: Sequence[int] | None = None,
    ) -> tuple[torch.Tensor, list[int]]:
        """Return the hidden states (T, H) of all prompts, and the indices at which the prompts begin, followed by T.

        token_types: the type of each token, if the model reads types. nums_keys: for each prompt, the number of tokens
        from its first on that its tokens attend to; None: all. Models that keep their own attention have no such limit.
        """
        lengths = [len(prompt) for prompt in prompts]
        starts = [0, *accumulate(lengths)]
        if self._is_alone:
            return alone.encode(self.model, prompts, token_types, starts), starts
        token_ids = np.fromiter(chain.from_iterable(prompts), dtype=np.int64, count=starts[-1])
        positions = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths) + self._first_position
        types = {} if token_types is None else {"token_type_ids": to_device(token_types, self.device)[None]}
        hidden: torch.Tensor = self.model(
            input_ids=to_device(token_ids, self.device)[None],
            position_ids=to_device(positions, self.device)[None],
            use_cache=False,
            paged=self._pack(starts, None if nums_keys is None else np.repeat(nums_keys, lengths).astype(np.int32)),
            **types,
        ).last_hidden_state
        return hidden[0], starts

    @property
    def extra_warmup_tokens(self) -> Sequence[int]:
        """Return the length of the longest prompt in tokens.

        It may exceed a step's token budget, and is then a step of its own.
        """
        return (self.facts.max_model_len,)


def average(hidden: torch.Tensor, starts: Sequence[int]) -> torch.Tensor:
    """Return the mean of each sequence's hidden states (T, H), float32 (sequences, H).

    Sequence i has the tokens starts[i] .. starts[i + 1] - 1.
    """
    lengths, device = np.diff(starts), hidden.device
    sequences = to_device(np.repeat(np.arange(len(lengths)), lengths), device)
    sums = torch.zeros((len(lengths), hidden.shape[1]), device=device).index_add_(0, sequences, hidden.float())
    return sums / to_device(lengths, device)[:, None]


def check_settings(config: EngineConfig) -> None:
    """Reject settings that apply only to generation. Raises ConfigError."""
    if config.attention_backend not in ("auto", "torch"):
        raise ConfigError(
            f"`attention_backend: {config.attention_backend}` reads a KV cache, but an encoder has none; "
            "use `attention_backend: auto`"
        )
