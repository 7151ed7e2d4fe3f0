"""Measures the tokens per second that clients get over HTTP from an engine whose forward does nothing.

Called by `host`. The GPU suite uses parts of this file to measure its own streams.

`python -m conveyor_bench.engine.served` runs the real server (`serve`), which starts the engine process of `idle`. The
client collects the bytes as they arrive, and checks them only at the end.
"""

import asyncio
import json
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from conveyor_bench.engine.idle import VOCABULARY
from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.logs import configure_logging
from conveyor_engine.serving.preparing.jobs import ServedModel
from conveyor_engine.serving.preparing.process import ForkServer
from conveyor_engine.serving.preparing.sampling_defaults import SamplingDefaults
from conveyor_engine.serving.server import serve
from conveyor_engine.text.tokenizer import Tokenizer

_PROMPT = "a prompt of a few words"
MODEL = "bench"


def measure_served(rows: int, tokens: int) -> float:
    """Return the streamed tokens per second of all clients together, from the first token to the last one."""
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), VOCABULARY)
        command = [sys.executable, "-m", "conveyor_bench.engine.served", folder, str(rows), str(tokens)]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
            try:
                times = asyncio.run(stream_all(wait_ready(server), rows, tokens, _PROMPT))
            finally:
                server.terminate()
    return rows * tokens / (max(end for _, _, end in times) - min(first for _, first, _ in times))


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a tokenizer in which every byte is a token. All further tokens are words that only answers can have."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    assert len(alphabet) == VOCABULARY
    words = [f"Ġ{number}" for number in range(vocab_size - VOCABULARY)]
    tokenizer = FastTokenizer(models.BPE({piece: index for index, piece in enumerate(alphabet + words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def wait_ready(server: "subprocess.Popen[str]") -> int:
    """Return the port when the server listens. Its engine may still load. Raises RuntimeError if the server ends."""
    assert server.stderr is not None
    lines = []
    for line in server.stderr:
        lines.append(line)
        if match := re.search(r"event=listening .*port=(\d+)", line):
            return int(match[1])
    raise RuntimeError("the server did not start: " + "".join(lines))


async def stream_all(port: int, rows: int, tokens: int, prompt: str) -> list[tuple[float, float, float]]:
    """Return for each stream the times of its request and of its first and last bytes. A short round warms up first."""
    while not await _is_ready(port):  # noqa: ASYNC110  another process has no event
        await asyncio.sleep(0.05)
    await asyncio.gather(*(_stream(port, 2, prompt) for _ in range(rows)))  # warms connections, workers and caches
    return await asyncio.gather(*(_stream(port, tokens, prompt) for _ in range(rows)))


async def _is_ready(port: int) -> bool:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /readyz HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    return answer.startswith(b"HTTP/1.1 200")


async def _stream(port: int, tokens: int, prompt: str) -> tuple[float, float, float]:
    """Read one stream. Raises RuntimeError unless the answer has all its tokens."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True}
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nConnection: close\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    sent = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + content)
    first, pieces = 0.0, []
    while piece := await reader.read(1 << 16):
        first = first or time.monotonic()
        pieces.append(piece)
    end = time.monotonic()
    writer.close()
    answer = b"".join(pieces)
    if not answer.startswith(b"HTTP/1.1 200") or b'"finish_reason":"length"' not in answer:
        raise RuntimeError(f"a stream ended early: {answer[:500]!r}")
    return sent, first, end


def serve_with(config: EngineConfig, engine_program: str) -> None:
    """Run the server with the tokenizer of `config.model`, and `engine_program` in place of the engine process."""
    from uvloop import run

    configure_logging()
    model = ServedModel(MODEL, Tokenizer(Path(config.model)), SamplingDefaults())
    run(serve(replace(config, task="generate"), ForkServer(model), engine_program))


def _serve(folder: str, rows: str, tokens: str) -> None:
    config = EngineConfig(
        model=folder,
        host="127.0.0.1",
        port=0,
        max_model_len=len(_PROMPT) + int(tokens) + 2,
        max_num_seqs=int(rows),
        max_num_queued_requests=int(rows),
    )
    serve_with(config, "conveyor_bench.engine.idle")


if __name__ == "__main__":
    _serve(*sys.argv[1:])
