"""Runs plans: packed batch -> forward -> sampled tokens. On a request's path, no code before this file uses torch.

`loop` calls the runner for each step. It implements the protocol `loop.executor` for one device. It owns the model, the
KV caches and the rows, and knows nothing about requests, queues or policies. If there are CUDA graphs, `graphs` replays
most steps. The other steps run eagerly.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import msgspec
import torch

from conveyor_engine.config.engine_config import GUESSING, EngineConfig
from conveyor_engine.execution import kernels
from conveyor_engine.execution.attention.backend import Ends, LayerShape
from conveyor_engine.execution.attention.groups import group_layers, list_parts
from conveyor_engine.execution.attention.interface import Paged, PagedStep, Probe
from conveyor_engine.execution.attention.select import select_backend
from conveyor_engine.execution.batch import build_batch, lay_out, only_sampled
from conveyor_engine.execution.graphs.cuda import Capture, choose_capture
from conveyor_engine.execution.graphs.decodes import DecodeSteps
from conveyor_engine.execution.graphs.mixed import MixedSteps, token_sizes
from conveyor_engine.execution.graphs.step_graphs import StepGraphs
from conveyor_engine.execution.limits import check_settings_with_states, choose_max_model_len, find_context
from conveyor_engine.execution.models.adapt import ModelAdapters
from conveyor_engine.execution.models.adapter_files import Adapter
from conveyor_engine.execution.models.gpu_linear import list_variants
from conveyor_engine.execution.models.last_layer import find_last_layer, lay_in_block
from conveyor_engine.execution.models.latent import EXPANDING, keep_latents, prompt_bytes
from conveyor_engine.execution.models.mixers import reads_lengths
from conveyor_engine.execution.models.native_layers import join_layers
from conveyor_engine.execution.models.probe import probe_layers
from conveyor_engine.execution.models.rope import fix_frequencies
from conveyor_engine.execution.models.state_trial import check_states
from conveyor_engine.execution.models.towers import take_towers
from conveyor_engine.execution.placement import Placement, free_cached_memory
from conveyor_engine.execution.rows import Rows
from conveyor_engine.execution.runners.base import Runner
from conveyor_engine.execution.sampling.processor import Samples
from conveyor_engine.execution.sampling.sampler import Found, Sampled, Sampler, peak_bytes
from conveyor_engine.execution.start import Load, Progress, RunnerStart, find_eos_token_ids
from conveyor_engine.execution.states import Shapes, States, row_bytes
from conveyor_engine.execution.states import step_bytes as bytes_of_states
from conveyor_engine.tasks.generate.execution.draft import Forward, Guesser, Sample, add_forwards
from conveyor_engine.tasks.generate.execution.heads import open_guesser, reads_layers
from conveyor_engine.tasks.generate.execution.results import start_copy
from conveyor_engine.tasks.generate.execution.sight import KEPT_BYTES, Ahead, Seen
from conveyor_engine.tasks.generate.execution.sight_trial import open_sight
from conveyor_engine.tasks.generate.execution.slices import SlicedEncoder
from conveyor_engine.wire.kv_tables import ONE_TABLE, KVTables
from conveyor_engine.wire.request import ModelFacts
from conveyor_engine.wire.step import NUM_AHEAD, RowMask, StepPlan, StepResult


class GenerateRunner(Runner):
    """One model on one device, ready to run after construction. `loop.core` warms it up."""

    def __init__(
        self,
        config: EngineConfig,
        placement: Placement,
        progress: Progress = lambda _: None,
        load: Load | None = None,
        capture: Capture | None = None,
    ) -> None:
        """Load the model and allocate the KV caches. Raises ConfigError or ModelError.

        load: as in `RunnerStart`. capture: replaces CUDA graphs, so that a CPU can replay steps too.
        """
        start = RunnerStart(config, placement, progress, load=load)
        self.device = start.device
        max_model_len = choose_max_model_len(config, find_context(start.model_config))
        self.backend = select_backend(
            config.attention_backend, self.device, start.dtype, config.block_size, config.kv_cache_dtype
        )
        adapters = [Adapter(name, directory) for name, directory in config.adapters]
        self.model = start.load()
        towers = take_towers(self.model) if start.sees else []
        fix_frequencies(self.model, max_model_len)
        self._keep_latents(start, adapters)
        layers, shapes = probe_layers(self.model, self.device)
        if shapes:
            self._prepare_states(start, layers, shapes, placement.world_size)
        self._sight, blind_because = open_sight(self.model, towers, start, layers, shapes)
        start.fuse(self.model, len(layers))
        self._adapters: ModelAdapters | None = None
        if adapters or config.adapters_file:
            self._adapters = ModelAdapters(self.model, self.device, start.dtype)
            for number, adapter in enumerate(adapters, start=1):
                list(self._adapters.load(number, self._adapters.fit(adapter)))
            start.progress(f"event=adapters_loaded number={len(adapters)} ranks={sum(each.rank for each in adapters)}")
        is_apart = self._sight is not None and (self._sight.is_deep or self._sight.sees_ahead)
        if not is_apart and not reads_layers(config):
            join_layers(self.model)
        self._draft: Guesser | None = None
        if config.speculation in GUESSING:
            self._draft = open_guesser(start, placement, self.model, max_model_len)
        if shapes:  # all weights are in memory
            start.limit_rows(row_bytes(shapes, copied=config.speculation is not None))
        capture = capture or choose_capture(self.device, config.enforce_eager)
        self._workload = config.workload
        # Graphs have no all-reduce yet, and transformers' code for states reads lengths.
        can_capture, ranks, reads = self.backend.is_capturable, placement.world_size, reads_lengths(self.model)
        if capture is not None and (not can_capture or ranks > 1 or reads):
            progress(f"event=graphs_left_out attention_allows={can_capture} {ranks=} states_by_transformers={reads}")
            capture = None
        num_spare = int(capture is not None)  # spare rows and blocks for the padding of graphs
        reads_last = self._draft is not None and self._draft.reads_last
        self.last_layer = None if reads_last else find_last_layer(self.model, layers)
        in_flight = (1 + NUM_AHEAD) * start.max_num_batched_tokens
        tables = ONE_TABLE
        if self._draft is None:  # a draft model's blocks have the numbers of the one table
            layers, tables = group_layers(layers, max_model_len, config.block_size, in_flight)
        num_rows, parts = start.max_num_seqs + num_spare, list_parts(layers)
        self._rows = Rows(num_rows, max_model_len, config.block_size, self.device, parts, tables.full)
        if self._sight is not None and self._sight.has_axes:
            self._rows.use_shifts()
        num_blocks = self._allocate(start, layers, max_model_len, num_spare, shapes, tables)
        num_saved = 0 if config.speculation is None else start.max_num_seqs
        self._states = States.allocate(shapes, num_rows, self.device, num_saved) if shapes else None
        self.facts = start.facts(
            self.model,
            max_model_len=max_model_len,
            attention_backend=self.backend.name,
            eos_token_ids=find_eos_token_ids(self.model),
            num_kv_blocks=num_blocks,
            kv_tables=tables,
        )
        self._sampler = Sampler(num_rows, self.facts.vocab_size, self.device, self._rows.token_ids)
        self._make_adapted_graphs: Callable[[], StepGraphs] | None = None
        self.graphs: StepGraphs | None = None
        self._adapted_graphs: StepGraphs | None = None  # of steps in which rows may use any adapters
        if capture is not None:
            self.graphs = self._make_graphs(capture, num_blocks, progress, ())
            self._make_adapted_graphs = partial(self._make_graphs, capture, num_blocks, progress, None)
            if adapters:
                self._capture_adapted()
            if self._adapters is not None:
                self._adapters.on_moved = self._capture_adapted
        self._sliced: SlicedEncoder | None = None
        if self._sight is not None:
            self._sight.open()
            has_goal = config.objective_inter_token_latency_seconds is not None
            self._sliced = SlicedEncoder(self._sight, has_goal) if self.device.type == "cpu" else None
            if self._sight.sees_ahead:
                self._run_ends(in_full_layers=self._sight.ahead is Ahead.EVERYWHERE)
        self.facts = msgspec.structs.replace(
            self.facts,
            has_states=self._states is not None,
            num_lost_graphs=sum(made.num_lost for made in (self.graphs, self._adapted_graphs) if made is not None),
            image_place=self._sight and self._sight.place_id,
            no_images_because=blind_because,
            whole_images=self._sight is not None and self._sight.sees_ahead,
            encodes_beside=self._sliced is not None,
            draft_lag=0 if self._draft is None else self._draft.lag,
        )

    def _run_ends(self, *, in_full_layers: bool) -> None:
        """Run two tokens that see each other, because a GPU compiles attention for such steps when the first one comes.

        Writes to block 0, which no request has yet.
        """
        tokens = torch.zeros((1, 2), dtype=torch.int64, device=self.device)
        metadata = lay_in_block([0, 2], [2], tokens[0])
        metadata.others = tuple(replace(metadata) for _ in range(self._rows.tables.shape[0] - 1))
        metadata.set_ends(Ends(torch.full_like(tokens[0], 2, dtype=torch.int32), in_full_layers))
        with torch.inference_mode():
            self._forward(tokens, tokens, 0, PagedStep(self.backend, metadata, token_rows=tokens[0]), ())

    def count_free_bytes(self) -> int:
        """Return the host's memory that neither steps nor adapters need."""
        assert self._adapters is not None
        return self._adapters.count_free_bytes()

    def read_adapter(self, name: str, directory: str) -> Adapter:
        """Read an adapter into the host's memory."""
        assert self._adapters is not None
        return self._adapters.read(name, directory)

    def load_adapter(self, number: int, copy: Adapter) -> Iterator[None]:
        """Return an iterator that loads an adapter between steps."""
        assert self._adapters is not None
        return self._adapters.load(number, copy)

    def unload_adapter(self, number: int) -> None:
        """Free what an adapter takes. No later step has rows that use it."""
        assert self._adapters is not None
        self._adapters.unload(number)

    def _keep_latents(self, start: RunnerStart, adapters: Sequence[Adapter]) -> None:
        """Keep latents in the cache where layers have them, unless an adapter changes the layer that expands them."""
        is_changed = any(name.endswith(f".{EXPANDING}") for adapter in adapters for name in adapter.shapes)
        if not is_changed and (num_layers := keep_latents(self.model, self.backend.widest_latent)):
            start.progress(f"event=latents_kept layers={num_layers}")

    def _prepare_states(self, start: RunnerStart, layers: list[LayerShape], shapes: Shapes, world_size: int) -> None:
        """Check a model whose layers keep states for rows. Raises ConfigError or ModelError."""
        check_settings_with_states(start.config, type(self.model).__name__, world_size)
        check_states(self.model, layers, shapes)

    def _allocate(
        self,
        start: RunnerStart,
        layers: list[LayerShape],
        max_model_len: int,
        num_spare: int,
        shapes: Shapes,
        tables: KVTables,
    ) -> int:
        """Allocate the KV caches, with room for the states. Returns the number of blocks without spare ones."""
        vocab_size = self.model.get_input_embeddings().num_embeddings
        step_bytes = self._find_step_bytes(start, start.max_num_batched_tokens, max_model_len)
        step_bytes += peak_bytes(start.max_num_logits, vocab_size, self.device)
        step_bytes += prompt_bytes(self.model, max_model_len, start.dtype)
        step_bytes += self._sight.step_bytes + KEPT_BYTES if self._sight is not None else 0
        if self._adapters is not None:
            self._adapters.reserved_bytes = step_bytes
        step_bytes += self._draft.step_bytes if self._draft is not None else 0
        num_rows = start.max_num_seqs + num_spare
        step_bytes += num_rows * row_bytes(shapes, copied=start.config.speculation is not None)
        step_bytes += bytes_of_states(shapes, start.max_num_seqs) if reads_lengths(self.model) else 0
        if num_spare:  # graphs keep the memory of their largest step
            largest = max(start.max_num_seqs, token_sizes(start.max_num_batched_tokens)[-1])
            num_sets = 1 if self._adapters is None else 2
            step_bytes += num_sets * self._find_step_bytes(start, largest, max_model_len)
        how = self.backend, layers, max_model_len, step_bytes, num_spare, tables
        if self._draft is None:
            return start.allocate_cache(*how)
        num_blocks = start.allocate_cache(*how, draft_bytes=self._draft.block_bytes)
        self._draft.allocate(num_blocks)
        return num_blocks

    def _find_step_bytes(self, start: RunnerStart, num_tokens: int, max_model_len: int) -> int:
        """Return the bytes that a forward of `num_tokens` tokens needs, with all logits of a step."""
        positions = torch.arange(num_tokens, device=self.device)[None] % max_model_len
        step = (torch.zeros_like(positions), positions, positions.new_zeros(start.max_num_logits), Probe())
        return start.find_step_bytes(
            self.model,
            num_tokens,
            "`max_num_batched_tokens`",
            lambda: self._forward(*step),
            num_logits=start.max_num_logits,
        )

    @property
    def extra_warmup_tokens(self) -> Sequence[int]:
        """Return the tokens of extra warm-up steps: those of which Triton kernels have variants."""
        return (1, 2, 4, *list_variants(self.model)) if kernels.why_missing(self.device) is None else ()

    @property
    def graph_sizes(self) -> list[int]:
        """Return the numbers of rows for which decodes are captured. Empty on a CPU."""
        return self.graphs.sizes(DecodeSteps.name) if self.graphs is not None else []

    def _make_graphs(
        self, capture: Capture, spare_block: int, progress: Progress, used: Sequence[int] | None
    ) -> StepGraphs:
        """Capture graphs of as many sizes as fit into memory. used: as in `_forward`."""
        rows, facts = self._rows, self.facts
        rows.set_spare(facts.max_num_seqs, spare_block)
        how = (rows, self.backend, partial(self._forward, used=used))
        largest = self._find_largest_decode(facts)
        kinds = (
            DecodeSteps(*how, largest, self._states),
            MixedSteps(*how, facts.max_num_batched_tokens, self._states),
        )
        graphs = StepGraphs(kinds, rows, self._sampler if self._sampler.chooses else None)
        with torch.inference_mode():
            graphs.capture(capture, progress)
        free_cached_memory(self.device)  # frees the memory of the run that precedes each capture
        return graphs

    def _capture_adapted(self) -> None:
        """Capture the graphs of steps with adapters, in place of those of other matrices."""
        self._adapted_graphs = None  # frees their memory
        if self._make_adapted_graphs is not None:
            self._adapted_graphs = self._make_adapted_graphs()

    def _find_largest_decode(self, facts: ModelFacts) -> int | None:
        """Return the number of rows of the largest step of decodes that is worth a graph.

        The number depends on the expected lengths of requests. Returns None if these lengths are not known.
        """
        workload = self._workload
        if workload is None:
            return None
        capacity = facts.kv_tables.count_tokens(facts.num_kv_blocks, facts.block_size, workload.short_tokens)
        return workload.find_largest_graph(facts.max_num_seqs, capacity)

    def begin(self, plan: StepPlan) -> Sample:
        """Begin a step: apply the plan's changes and compute the logits. Returns a function that samples, see
        `_sample`.

        On a GPU it launches all of this and waits for nothing.
        """
        began = time.perf_counter()
        with torch.inference_mode():
            self._rows.update(plan)
            for admitted in plan.admitted:
                assert admitted.sampling is not None
                self._sampler.set_row(admitted.row, admitted.sampling)
                if self._sight is not None:
                    self._rows.shift(admitted.row, self._sight.admit(admitted))
            if not plan.rows:
                return lambda _: partial(self._encode, plan, None, lambda: StepResult(plan.number, []))
            forwards: list[Forward] = []
            if self._draft is not None and plan.readings:
                plan, forwards = self._draft.draft(plan, self._rows)
            if self._states is not None and plan.drafts:
                self._states.save(plan.rows[plan.num_decodes : plan.num_decodes + len(plan.drafts)])
            shows = self._sight is not None and self._sight.is_in(plan.rows, plan.num_computed_tokens)
            logits, samples, found = (None if shows else self._replay(plan)) or self._launch(plan, shows=shows)
        sample = add_forwards(forwards, partial(self._sample, plan, logits, samples, found))
        return sample if self._sliced is None else (lambda masks: partial(self._encode, plan, began, sample(masks)))

    def _encode(self, plan: StepPlan, began: float | None, read: Callable[[], StepResult]) -> StepResult:
        """Read the step's result, then encode wanted pictures for a share of the step's time, or end an encoding that
        nobody wants any more."""
        assert self._sliced is not None
        result = read()
        step_seconds = None if began is None else time.perf_counter() - began
        encoded = self._sliced.encode(plan, step_seconds)
        return msgspec.structs.replace(result, encoded=encoded)

    def _sample(
        self,
        plan: StepPlan,
        logits: torch.Tensor,
        samples: Samples,
        found: Found | None,
        masks: Sequence[RowMask],
    ) -> Callable[[], StepResult]:
        """Choose the tokens and write them into the rows. Returns a function that waits for the results.

        On a GPU it only launches work. So the next step, whose inputs are these tokens, can begin before they reach the
        host. found: the tokens that the step's graph has chosen and written.
        """
        with torch.inference_mode():
            if found is not None and not masks and self._sampler.is_enough(samples):
                return start_copy(plan, Sampled(found.tokens, None))
            sampled = self._sampler.sample(logits, samples, masks, found)
            self._rows.append(samples.device_rows, samples.device_positions, sampled.token_ids)
            return start_copy(plan, sampled, self._states)

    def _replay(self, plan: StepPlan) -> tuple[torch.Tensor, Samples, Found | None] | None:
        graphs = self._adapted_graphs if self._find_used(plan) else self.graphs
        return graphs.run(plan) if graphs is not None else None

    def _launch(self, plan: StepPlan, *, shows: bool) -> tuple[torch.Tensor, Samples, None]:
        """shows: whether the step computes tokens of images."""
        batch = build_batch(plan, self._rows, self.facts.block_size)
        last = None if self.last_layer is None else only_sampled(self.last_layer, batch, self._rows)
        paged = PagedStep(self.backend, batch.metadata, last, batch.token_rows, self._states)
        sample_rows = batch.logit_indices if last is None else 0
        inputs = (batch.input_ids, batch.position_ids, sample_rows, paged, self._find_used(plan))
        seen = None
        if shows:
            assert self._sight is not None
            seen = self._sight.see(lay_out(plan), batch.input_ids)
            batch.metadata.set_ends(seen.ends)
        logits = self._forward(*inputs, seen)
        if self._draft is not None:
            self._draft.keep(batch.metadata.slot_mapping)
        return logits, batch.samples, None

    def _find_used(self, plan: StepPlan) -> Sequence[int]:
        """Return the numbers of the adapters that rows of the step use."""
        return self._rows.list_adapters(plan.rows) if self._adapters is not None else ()

    def _forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        sample_rows: torch.Tensor | int,
        paged: Paged,
        used: Sequence[int] | None = None,
        seen: Seen | None = None,
    ) -> torch.Tensor:
        """Compute logits (R, vocabulary) from input_ids and position_ids, both (1, T).

        sample_rows: the indices (R,) of tokens that get logits; 0 for all tokens. used: the adapters of the tokens;
        None: not known, as in a graph, which later runs with others. seen: set if the step has tokens before the end of
        a prompt's last picture.
        """
        if self._adapters is not None:
            self._adapters.of_step.begin_step(self._rows.adapters, input_ids.shape[1], paged, used)
        if isinstance(paged, PagedStep):
            position_ids = self._rows.shift_positions(position_ids, paged.token_rows)
        logits: torch.Tensor = self.model(
            input_ids=input_ids,
            use_cache=False,
            logits_to_keep=sample_rows,
            paged=paged,
            **({"position_ids": position_ids} if seen is None else seen.arguments()),
        ).logits
        return logits[0]
