"""Runs plans of an embedding model, which turns the hidden states of each prompt into what its request asks for.

All requests of a batch share one forward, whatever each of them asks for. See `runners.packed` and `heads`.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from transformers import PretrainedConfig

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.errors import ModelError
from conveyor_engine.execution.models.head import split_head
from conveyor_engine.execution.models.kinds import MASKED_LM, ModelKind
from conveyor_engine.execution.placement import Placement
from conveyor_engine.execution.runners.packed import PackedRunner, check_settings
from conveyor_engine.execution.start import Progress, RunnerStart
from conveyor_engine.execution.transfer import to_device
from conveyor_engine.tasks.embed.execution.dense import read_dense
from conveyor_engine.tasks.embed.execution.files import Instructions, read_instructions
from conveyor_engine.tasks.embed.execution.heads import (
    SPARSE_FILE,
    LexicalHead,
    SpladeHead,
    compute_max_sim,
    read_token_head,
)
from conveyor_engine.tasks.embed.execution.outputs import list_outputs, read_files
from conveyor_engine.tasks.embed.execution.pooling import encode_many, encode_sparse, encode_splade, finish, pool
from conveyor_engine.tasks.embed.execution.token_files import TokenVectors
from conveyor_engine.tasks.embed.facts import (
    SPARSE_NUMBERS_MAX,
    EmbeddingFacts,
    PoolingMode,
    PoolingParams,
    QueryTokens,
)
from conveyor_engine.wire.step import AdmittedRow

_SPARSE_BYTES: Final = 16  # for a number of a sparse vector: an index and a weight, which are copied once


class PoolRunner(PackedRunner):
    """One embedding model on one device."""

    def __init__(self, config: EngineConfig, placement: Placement, progress: Progress, kind: ModelKind) -> None:
        """Load the model. Raises ConfigError or ModelError."""
        check_settings(config)
        directory = Path(config.model)
        start = RunnerStart(config, placement, progress, kind)
        self._pooling, tokens = read_files(directory)
        instructions = read_instructions(directory)
        encoder, self._splade = start.load(), None
        vocab_size = encoder.get_input_embeddings().num_embeddings
        if kind is MASKED_LM:
            encoder, head, _ = split_head(encoder, per_token=True)
            self._splade = SpladeHead(directory, head, vocab_size)
        super().__init__(start, encoder, self._pooling.max_seq_length, of_task=b"")
        self._read_heads(directory, tokens, int(start.model_config.hidden_size))
        self._check_tokens(tokens, start.model_config)
        embedding = self._describe(directory, start.model_config, instructions, tokens)
        self.facts = msgspec.structs.replace(self.facts, of_task=embedding.encode())
        progress(f"event=pooling_chosen mode={self._mode} normalizes={str(self._pooling.normalizes).lower()}")
        progress(f"event=outputs_chosen outputs={','.join(embedding.outputs)}")
        step_bytes = self._find_largest(start, vocab_size, tokens)
        progress(f"event=largest_step_fits mib={step_bytes / 2**20:.0f}")

    def _find_largest(self, start: RunnerStart, vocab_size: int, tokens: TokenVectors | None) -> int:
        """Return the memory of the largest step. Raises ModelError if it does not fit."""
        if self._splade is None:
            payload, longest = PoolingParams(output="embed_all").encode(), self.facts.max_model_len
            query = tokens.encodings.get("query") if tokens else None
            of_query = max(query.num_tokens, query.max_tokens or longest) if query else 0
            return self.find_step_bytes(start, payload, more_tokens=min(of_query, longest))
        payload = PoolingParams(output="embed_sparse").encode()
        result_bytes = _SPARSE_BYTES * min(vocab_size, SPARSE_NUMBERS_MAX) * self.facts.max_num_seqs
        return self.find_step_bytes(start, payload, self._splade.chunk_tokens, result_bytes)

    def _read_heads(self, directory: Path, tokens: TokenVectors | None, hidden_size: int) -> None:
        self._mode: PoolingMode = self._pooling.mode or ("last" if self.is_causal else "mean")
        self._dense, self._size = read_dense(directory, self._pooling.dense, hidden_size, self.device)
        self._tokens = read_token_head(directory, tokens, hidden_size, self.device, self._dense, self._size)
        self._skipped = np.array(sorted(tokens.skipped) if tokens else [], dtype=np.int64)
        has_weights = (directory / SPARSE_FILE).is_file()
        self._lexical = LexicalHead(directory, hidden_size, self.device) if has_weights else None

    def _check_tokens(self, tokens: TokenVectors | None, model_config: PretrainedConfig) -> None:
        """Reject queries whose fillers this engine cannot leave out of attention. Raises ModelError."""
        encodings = list(tokens.encodings.values()) if tokens else []
        if (most := max((each.num_tokens for each in encodings), default=0)) > self.facts.max_model_len:
            raise ModelError(f"queries have {most} tokens, more than the context of {self.facts.max_model_len}")
        hidden = [each for each in encodings if each.num_tokens and not each.attends]
        window = getattr(model_config, "sliding_window", None) or getattr(model_config, "local_attention", 0) // 2
        longest = max((each.num_tokens for each in hidden), default=0)
        if hidden and (self._is_alone or (window and longest > window)):
            raise ModelError(
                f"queries are filled up to {longest} tokens that others do not attend to, and the attention of "
                f"{type(self.model).__name__} cannot leave them out here"
            )

    def _describe(
        self, directory: Path, model_config: PretrainedConfig, instructions: Instructions, tokens: TokenVectors | None
    ) -> EmbeddingFacts:
        """Return facts, some from the fields of config.json that vLLM reads: `matryoshka_dimensions` and its like."""
        named = getattr(model_config, "matryoshka_dimensions", None)
        named = named if isinstance(named, list | tuple) else ()
        named = tuple(sorted({d for d in named if type(d) is int and 1 <= d <= self._size}))
        return EmbeddingFacts(
            size=self._size,
            pooling=self._mode,
            is_matryoshka=bool(named) or getattr(model_config, "is_matryoshka", False) is True,
            matryoshka_dimensions=named,
            instructions={**instructions.texts, **(tokens.instructions if tokens else {})},
            default_instruction=instructions.default,
            outputs=list_outputs(directory, self._pooling, tokens, self._splade is not None),
            token_size=self._tokens.size,
            hidden_size=int(model_config.hidden_size),
            encodings=dict(tokens.encodings) if tokens else {},
        )

    def _compute(self, prompts: Sequence[AdmittedRow]) -> list[torch.Tensor]:
        """Compute one tensor for each prompt.

        The vectors of whole texts are in one tensor, which is the first, in the order of their prompts. The last ones
        are those of SPLADE.
        """
        params = [PoolingParams.read(prompt.payload) for prompt in prompts]
        token_ids: list[Sequence[int]] = [prompt.token_ids for prompt in prompts]
        nums_keys = [each.num_keys for each in params]
        queries = {query: len(prompts) + i for i, query in enumerate({p.query: None for p in params if p.query})}
        for query in queries:
            token_ids.append(query.token_ids)
            nums_keys.append(query.num_keys)
        limits = [keys or len(ids) for keys, ids in zip(nums_keys, token_ids, strict=True)] if any(nums_keys) else None
        hidden, starts = self._encode(token_ids, nums_keys=limits)
        parts = [hidden[begin:end] for begin, end in pairwise(starts)]
        whole = [index for index, each in enumerate(params) if each.output == "embed"]
        computed = [self._embed(hidden, starts, whole)] if whole else []
        vectors = {query: self._embed_tokens(parts[i], query.token_ids, query) for query, i in queries.items()}
        for index, each in enumerate(params):
            if each.query is not None:
                document = self._embed_tokens(parts[index], token_ids[index], each)
                computed.append(compute_max_sim(vectors[each.query], document))
            elif each.output != "embed" and not self._uses_splade(each):
                computed.append(self._compute_tokens(parts[index], each, token_ids[index]))
        sparse = [parts[index] for index, each in enumerate(params) if self._uses_splade(each)]
        if sparse and self._splade is not None:
            joined = hidden if len(sparse) == len(parts) else torch.cat(sparse)
            computed += self._splade(joined, [0, *accumulate(map(len, sparse))])
        return computed

    def _uses_splade(self, params: PoolingParams) -> bool:
        return params.output == "embed_sparse" and self._lexical is None

    def _embed(self, hidden: torch.Tensor, starts: list[int], whole: list[int]) -> torch.Tensor:
        """Compute the vectors of these sequences, float32 (sequences, size)."""
        pooled = pool(hidden, starts, self._mode)
        if len(whole) < len(starts) - 1:
            pooled = pooled[to_device(np.array(whole), self.device)]
        vectors: torch.Tensor = self._dense(pooled)
        return vectors

    def _compute_tokens(self, states: torch.Tensor, params: PoolingParams, token_ids: Sequence[int]) -> torch.Tensor:
        """Compute what one sequence's tokens get, float32: states (n, H) -> (n,) weights or (n, size) vectors."""
        if params.output == "embed_all":
            return states.float()
        if params.output != "token_embed":
            assert self._lexical is not None
            return self._lexical(states)
        return self._embed_tokens(states, token_ids, params, params.normalizes)

    def _embed_tokens(
        self,
        states: torch.Tensor,
        token_ids: Sequence[int],
        params: PoolingParams | QueryTokens,
        normalizes: bool | None = None,
    ) -> torch.Tensor:
        """Compute the vectors of one sequence's tokens, float32: states (n, H) -> (n, size), without skipped tokens."""
        if params.drops_skiplist and len(self._skipped):
            kept = np.flatnonzero(~np.isin(np.asarray(token_ids), self._skipped))
            states = states[to_device(kept, self.device)]
        return self._tokens(states[int(self._tokens.drops_first) :], normalizes=normalizes)

    def _finish(self, computed: Sequence[npt.NDArray[Any]], prompts: Sequence[AdmittedRow]) -> Iterator[bytes]:
        params = [PoolingParams.read(prompt.payload) for prompt in prompts]
        left, payloads = deque(computed), [b""] * len(prompts)
        whole = [index for index, each in enumerate(params) if each.output == "embed"]
        for index, vector in zip(whole, left.popleft() if whole else (), strict=True):
            payloads[index] = finish(vector, params[index], normalizes=self._pooling.normalizes)
        for index, each in enumerate(params):
            if each.output != "embed" and not self._uses_splade(each):
                token_ids = np.asarray(prompts[index].token_ids, dtype=np.int64)
                payloads[index] = self._finish_tokens(left.popleft(), each, token_ids)
        for index, each in enumerate(params):
            if self._uses_splade(each):
                payloads[index] = encode_splade(left.popleft())
        yield from payloads

    def _finish_tokens(
        self, numbers: npt.NDArray[np.float32], params: PoolingParams, token_ids: npt.NDArray[np.int64]
    ) -> bytes:
        if params.output in ("embed_all", "token_embed"):
            return encode_many(numbers, params)
        assert self._lexical is not None
        if params.output == "token_classify":
            return encode_many(self._lexical.trim(token_ids, numbers), params)
        return encode_sparse(*self._lexical.make_sparse(token_ids, numbers))
