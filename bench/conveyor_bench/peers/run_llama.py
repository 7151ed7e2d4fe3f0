# /// script
# requires-python = ">=3.11"
# dependencies = ["llama-cpp-python==0.3.36", "numpy>=2"]
# [tool.uv.extra-build-variables.llama-cpp-python]
# CMAKE_ARGS = """-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DLLAMA_BUILD_TOOLS=OFF \
#   -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TESTS=OFF"""
# ///
"""llama.cpp as a system of the bench: `run_llama.py MODEL DTYPE THREADS`, in its own environment.

MODEL is a directory in which `gguf_file` has written the weights. DTYPE may be one of llama.cpp's mixtures of quantized
types, such as Q4_K_M.

Requests are sequences of one batch, as in llama.cpp's own batched bench. Called by `process`, which describes the
protocol. Must not import Conveyor.
"""

import ctypes
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import llama_cpp as llama
import numpy as np

ERROR = 4  # one of llama.cpp's log levels
BATCH = 2048  # tokens in one call, computed in steps of 512; both are llama.cpp's defaults
Tokens = list[int]


def quantize(source: Path, path: Path, kind: str) -> None:
    """Write the weights of `source` in one of llama.cpp's mixtures of types."""
    params = llama.llama_model_quantize_default_params()
    params.ftype = getattr(llama, f"LLAMA_FTYPE_MOSTLY_{kind}")
    status = llama.llama_model_quantize(str(source).encode(), str(path).encode(), ctypes.byref(params))
    assert status == 0, f"llama_model_quantize: {status}"


class Engine:
    """A model, and a context as large as the largest run needed so far."""

    def __init__(self, path: Path, dtype: str, threads: int) -> None:
        llama.llama_log_set(LOG_ERRORS, ctypes.c_void_p())
        llama.llama_backend_init()
        self._model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
        assert self._model, "the model was not loaded"
        self._num_tokens = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
        self._batch = llama.llama_batch_init(BATCH, 0, 1)
        self._is_exact = dtype == "float32"
        self._threads = threads
        self._room = (0, 0)
        self._context: Any = None

    def start(self, prompts: Sequence[Tokens], output_tokens: int) -> Iterator[int | Tokens | list[Tokens]]:
        """Run the prompts. Yields the answers of the protocol."""
        self._make_room(len(prompts), max(map(len, prompts)) + output_tokens)
        yield 0
        rows = [[token] for token in self._decode(list(prompts), [0] * len(prompts))]
        yield [1] * len(rows)
        for done in range(1, output_tokens):
            places = [len(prompt) + done - 1 for prompt in prompts]
            for row, token in zip(rows, self._decode([row[-1:] for row in rows], places), strict=True):
                row.append(token)
            yield [done + 1] * len(rows)
        yield rows

    def _make_room(self, sequences: int, length: int) -> None:
        """Empty the context. If it is too small for the run, make a larger one first."""
        if sequences > self._room[0] or length > self._room[1]:
            if self._context is not None:
                llama.llama_free(self._context)
            self._room = (max(sequences, self._room[0]), max(length, self._room[1]))
            self._context = llama.llama_init_from_model(self._model, self._params())
            assert self._context, "the context was not made"
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)

    def _params(self) -> Any:
        params = llama.llama_context_default_params()
        params.n_seq_max, length = self._room
        params.n_ctx = self._room[0] * (-(-length // 256) * 256)  # a sequence has whole pages of 256
        params.n_batch = BATCH
        params.n_threads = params.n_threads_batch = self._threads
        if self._is_exact:  # llama.cpp's flash attention rounds to 16 bits
            params.type_k = params.type_v = llama.GGML_TYPE_F32
            params.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.kv_unified = False  # each sequence attends to its own cache alone
        params.no_perf = True
        return params

    def _decode(self, rows: Sequence[Tokens], places: Sequence[int]) -> Tokens:
        """Return the likeliest next token of each row. places: the position at which each row begins."""
        queue = [
            (token, place + offset, sequence, offset == len(row) - 1)
            for sequence, (row, place) in enumerate(zip(rows, places, strict=True))
            for offset, token in enumerate(row)
        ]
        found: Tokens = []
        for first in range(0, len(queue), BATCH):
            found += self._call(queue[first : first + BATCH])
        return found

    def _call(self, part: Sequence[tuple[int, int, int, bool]]) -> Iterator[int]:
        batch = self._batch
        batch.n_tokens = len(part)
        for i, (token, place, sequence, is_last) in enumerate(part):
            batch.token[i], batch.pos[i], batch.logits[i] = token, place, is_last
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
        status = llama.llama_decode(self._context, batch)
        assert status == 0, f"llama_decode: {status}"
        for i, (*_, is_last) in enumerate(part):
            if is_last:
                logits = llama.llama_get_logits_ith(self._context, i)
                yield int(np.ctypeslib.as_array(logits, (self._num_tokens,)).argmax())


def log_errors(level: int, text: bytes, _: ctypes.c_void_p) -> None:
    if level == ERROR:
        sys.stderr.write(text.decode(errors="replace"))


LOG_ERRORS = llama.llama_log_callback(log_errors)


def main(model: str, dtype: str, threads: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other output goes to standard error, because it is no answer
    path = Path(model) / "weights.gguf"
    if dtype not in ("bfloat16", "float32"):
        source, path = path, path.with_name(f"{dtype}.gguf")
        if not path.exists():
            quantize(source, path, dtype)
    engine = Engine(path, dtype, int(threads))
    run: Iterator[Any] = iter(())
    for line in sys.stdin:
        run = engine.start(**options) if (options := json.loads(line)) else run
        print(json.dumps(next(run)), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
