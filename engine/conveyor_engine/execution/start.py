"""Starts a runner: configuration, limits, weights, our own layers, memory and facts.

A runner creates a `RunnerStart`, calls `load`, and runs the loaded model once as a check. It then calls the methods
that it needs: `fuse`, `find_step_bytes`, `allocate_cache`, `facts`. So log lines and errors are the same for all
runners. Knows no plans and no rows.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.execution import machine
from conveyor_engine.execution.attention.backend import AttentionBackend, LayerShape
from conveyor_engine.execution.kv_budget import limit_rows, plan_num_blocks
from conveyor_engine.execution.largest_step import estimate_step, measure_step
from conveyor_engine.execution.limits import check_speculation, choose_batch_limits, dtype_name
from conveyor_engine.execution.models.divide import add_up, divide_model
from conveyor_engine.execution.models.fuse import fuse_model
from conveyor_engine.execution.models.kinds import CAUSAL_LM, ModelKind
from conveyor_engine.execution.models.linear import LinearSpec, linear_kind
from conveyor_engine.execution.models.loader import load_config, load_model
from conveyor_engine.execution.models.quantize import Quantizer, check_quantization, packs_on_gpu
from conveyor_engine.execution.models.quantized.deferred import read_weights
from conveyor_engine.execution.models.towers import put_back, take_towers
from conveyor_engine.execution.placement import Placement
from conveyor_engine.model_files import has_image_processor
from conveyor_engine.quantization import read_declared
from conveyor_engine.wire.kv_tables import ONE_TABLE, KVTables
from conveyor_engine.wire.request import ModelFacts
from conveyor_process.log import quote

Progress = Callable[[str], None]
Load = Callable[[str, PretrainedConfig, torch.dtype, torch.device], PreTrainedModel]


class RunnerStart:
    """The start of one runner on one device."""

    def __init__(
        self,
        config: EngineConfig,
        placement: Placement,
        progress: Progress,
        kind: ModelKind = CAUSAL_LM,
        load: Load | None = None,
    ) -> None:
        """Read the model's configuration, and choose number type and batch limits. Raises ConfigError or ModelError.

        load: loads the model from another source than its weights on disk. For measurements.
        """
        self.device, self._placement = placement.device, placement
        self.model_config = load_config(config.model, kind)
        self.dtype = machine.choose_dtype(config.dtype, self.device, self.model_config)
        check_speculation(config, self.device)
        check_quantization(config, self.device, self.dtype, read_declared(Path(config.model)))
        self.max_num_seqs, self.max_num_batched_tokens = choose_batch_limits(config, self.device, kind.task)
        self.config, self._kind, self.progress = config, kind, progress
        self.sees = kind is CAUSAL_LM and placement.world_size == 1 and has_image_processor(Path(config.model))
        # Only then are weights packed one after another.
        defers = kind.own_attention and config.attention_backend != "torch" and (self._has_kernels() or self._packs)
        self._load_model = load or partial(load_model, kind=kind, sees=self.sees, defers=defers)
        self._began = 0.0
        self._partial_sums: list[str] = []  # names of the linear layers whose outputs the ranks must add up

    def _has_kernels(self) -> bool:
        return linear_kind(LinearSpec(self.device.type, self.dtype)) == "native"

    @property
    def max_num_logits(self) -> int:
        """Return the most logits of a step: those of each row, and those of drafts."""
        return self.max_num_seqs + (0 if self.config.speculation is None else self.config.speculation_tokens)

    def load(self) -> PreTrainedModel:
        """Load the model, with transformers' own modules. Raises ModelError."""
        self._began = time.monotonic()
        task = "" if self._kind is CAUSAL_LM else f" task={self._kind.task}"
        path = self.config.model
        self.progress(f"event=model_loading path={path} device={self.device} dtype={dtype_name(self.dtype)}{task}")
        if (declared := read_declared(Path(path))) is not None:
            self.progress(f"event=weights_restored format={quote(declared.name)} dtype={dtype_name(self.dtype)}")
        if self._placement.world_size > 1:
            return self._load_share(path)
        if not self._packs:
            return self._load_model(path, self.model_config, self.dtype, self.device)
        return self._move(self._load_model(path, self.model_config, self.dtype, torch.device("cpu")))

    @property
    def _packs(self) -> bool:
        """Return whether weights of 8 or 4 bits stay so on a GPU."""
        has_few_bits = self.config.quantization is not None or read_declared(Path(self.config.model)) is not None
        return has_few_bits and self._kind.own_attention and packs_on_gpu(self.config, self.device)

    def _move(self, model: PreTrainedModel) -> PreTrainedModel:
        """Move a model from the host to the device, and pack its weights on the way."""
        if self._packs:
            from conveyor_engine.execution.models.gpu_packing import pack_model

            towers = take_towers(model) if self.sees else []  # they keep 16 bits
            returning = machine.MemoryReturn()
            pack_model(model, self.config.quantization, self.device, self.progress, after=returning.reach)
            put_back(model, towers)
        return model.to(self.device)

    def _load_share(self, path: str) -> PreTrainedModel:
        """Load this rank's share of the model.

        The ranks take turns, so that the host's memory holds at most one whole model at a time.
        """
        placement = self._placement
        for turn in range(placement.world_size):
            if turn == placement.rank:
                whole = self._load_model(path, self.model_config, self.dtype, torch.device("cpu"))
                self._partial_sums = divide_model(whole, placement.rank, placement.world_size)
                model = self._move(whole)
            placement.wait_for_others()
        self.progress(f"event=model_divided ranks={placement.world_size} sums={len(self._partial_sums)}")
        return model

    def fuse(self, model: PreTrainedModel, num_layers: int) -> None:
        """Replace modules by our own ones that compute the same. With `attention_backend: torch`, replace none.

        If the model is divided, also makes the ranks add up their results. The compiled layers for CPUs cannot do this,
        so they are not used then.
        """
        if self.config.attention_backend != "torch":
            whole_layers = self.device.type != "cpu" or not self._partial_sums
            quantizer = None if self._packs else Quantizer(model, self.config.quantization)
            fused = fuse_model(model, whole_layers=whole_layers, after=quantizer and self._returning_memory(quantizer))
            self.progress("event=model_fused " + " ".join(f"{kind}={count}" for kind, count in fused.items()))
            if quantizer is not None:
                self._end_rounding(quantizer)
            read_weights(model)
        add_up(model, self._partial_sums)
        self.progress(f"event=model_loaded layers={num_layers} seconds={time.monotonic() - self._began:.1f}")

    def _returning_memory(self, quantizer: Quantizer) -> Callable[[nn.Module], None]:
        """Return the quantizer. On CPUs it also returns memory to the system, now and then."""
        returning = machine.MemoryReturn()

        def finish(module: nn.Module) -> None:
            quantizer(module)
            if self.device.type == "cpu":
                returning.reach(quantizer.num_bytes)

        return finish

    def _end_rounding(self, quantizer: Quantizer) -> None:
        quantizer.check_share()
        quantizer.pack_embeddings()
        if quantizer.num_rounded:
            self.progress(f"event=weights_rounded {quantizer.summary}")
            machine.give_back_memory()

    def find_step_bytes(
        self, model: PreTrainedModel, num_tokens: int, settings: str, run: Callable[[], object], num_logits: int = 0
    ) -> int:
        """Return the bytes that a step needs in addition to weights and KV cache: measured on CUDA, estimated on a CPU.

        run: computes the step. Raises ModelError if a GPU has too little memory. The message names the `settings` that
        make the step smaller.
        """
        if self.device.type == "cuda":
            return measure_step(self.device, f"{num_tokens} tokens", settings, run)
        return estimate_step(model, num_tokens, num_logits)

    def allocate_cache(
        self,
        backend: AttentionBackend,
        layers: Sequence[LayerShape],
        max_model_len: int,
        step_bytes: int,
        num_spare: int = 0,
        tables: KVTables = ONE_TABLE,
        draft_bytes: int = 0,
    ) -> int:
        """Allocate the KV caches in the memory that the weights and the largest step leave.

        Returns the number of blocks, without `num_spare` further ones. Raises ConfigError if the cache is too small.

        draft_bytes: what a draft model keeps for each block. The caller allocates that.
        """
        block_size = self.config.block_size
        block_bytes = backend.block_bytes(layers, block_size, self.dtype) + draft_bytes
        num_blocks = self._plan_num_blocks(max_model_len, block_bytes, step_bytes + num_spare * block_bytes, tables)
        backend.allocate(layers, num_blocks + num_spare, block_size, self.dtype, self.device)
        self.progress(
            f"event=kv_cache_allocated backend={backend.name} blocks={num_blocks} block_size={block_size} "
            f"mib={num_blocks * block_bytes / 2**20:.0f} tables={tables.full} windowed={tables.windowed}"
        )
        return num_blocks

    def limit_rows(self, row_bytes: int) -> None:
        """Lower `max_num_seqs` if the memory has no room for so many states of `row_bytes`. Raises ConfigError."""
        self.max_num_seqs = limit_rows(
            self.config,
            max_num_seqs=self.max_num_seqs,
            row_bytes=row_bytes,
            free_bytes=machine.free_memory_bytes(self.device),
            is_cpu=self.device.type == "cpu",
        )
        mib = self.max_num_seqs * row_bytes / 2**20
        self.progress(f"event=states_planned rows={self.max_num_seqs} mib={mib:.0f}")

    def _plan_num_blocks(self, max_model_len: int, block_bytes: int, step_bytes: int, tables: KVTables) -> int:
        """Return the number of blocks. All ranks use the number of the rank with the least memory."""
        num_blocks = plan_num_blocks(
            self.config,
            max_num_seqs=self.max_num_seqs,
            max_model_len=max_model_len,
            block_bytes=block_bytes,
            free_bytes=max(0, machine.free_memory_bytes(self.device) - step_bytes),
            is_cpu=self.device.type == "cpu",
            tables=tables,
        )
        return self._placement.agree_on_least(num_blocks)

    def facts(
        self,
        model: PreTrainedModel,
        *,
        max_model_len: int,
        attention_backend: str,
        eos_token_ids: tuple[int, ...] = (),
        num_kv_blocks: int = 0,
        kv_tables: KVTables = ONE_TABLE,
        max_num_batched_tokens: int | None = None,
        vocab_size: int = 0,
        of_task: bytes = b"",
    ) -> ModelFacts:
        """Return facts about the started model. The arguments are what only the runner knows.

        max_num_batched_tokens: the budget of a step in the task's own unit, such as pixels; None: the default, in
        tokens. vocab_size: 0 if the task has no tokens. For kinds with `own_attention` it is ignored, and the
        size of the model's embeddings is used. of_task: see `ModelFacts`.
        """
        num_held = self._count_held(num_kv_blocks, kv_tables)
        if self.config.workload is not None:
            self.progress(
                f"event=sized_by_workload max_model_len={max_model_len} num_kv_blocks={num_kv_blocks} "
                f"requests_held={self.max_num_seqs if num_held is None else num_held}"
            )
        return ModelFacts(
            task=self._kind.task,
            max_model_len=max_model_len,
            vocab_size=model.get_input_embeddings().num_embeddings if self._kind.own_attention else vocab_size,
            eos_token_ids=eos_token_ids,
            dtype=dtype_name(self.dtype),
            device=str(self.device),
            attention_backend=attention_backend,
            num_kv_blocks=num_kv_blocks,
            kv_tables=kv_tables,
            block_size=self.config.block_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens or self.max_num_batched_tokens,
            num_held=num_held,
            of_task=of_task,
            speculates=self.config.speculation == "ngram",
        )

    def _count_held(self, num_kv_blocks: int, tables: KVTables) -> int | None:
        """Return how many requests of the configured workload the KV cache holds.

        Returns None if it holds a whole batch, or if there is no workload or no cache.
        """
        workload = self.config.workload
        if workload is None or not num_kv_blocks:
            return None
        capacity = tables.count_tokens(num_kv_blocks, self.config.block_size, workload.mean_tokens)
        num_held = workload.count_held(capacity)
        return num_held if num_held < self.max_num_seqs else None


def find_eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """Return the tokens that end a text, from the generation config, otherwise from the model's config.

    Ids that are not in the vocabulary are dropped.
    """
    vocab_size = model.get_input_embeddings().num_embeddings
    for config in (model.generation_config, model.config.get_text_config()):
        eos = getattr(config, "eos_token_id", None)
        if eos is not None:
            token_ids = [eos] if isinstance(eos, int) else eos
            return tuple(token_id for token_id in token_ids if 0 <= token_id < vocab_size)
    return ()
