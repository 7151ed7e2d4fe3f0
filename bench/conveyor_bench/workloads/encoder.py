"""Workloads of encoders, each beside a peer: `embed` here, `rerank` and `classify` in `classifiers`.

embed: texts of 8 to 512 tokens through a BERT, against sentence-transformers' own `encode`, which sorts by length and
pads batches of 32. Both systems get texts. First, both must give the same numbers with a small float32 model.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModel, BertConfig, PreTrainedTokenizerFast

from conveyor_bench.comparing.limit import Limit
from conveyor_bench.comparing.turns import OURS
from conveyor_bench.workloads.rounds import Figures, Limits, in_turns, measure_rounds
from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.execution.build import build_runner
from conveyor_engine.loop.core import EngineCore
from conveyor_engine.tasks.embed.facts import PoolingParams
from conveyor_engine.wire.request import EngineRequest

TEXTS, TOKENS, BATCH = 128, (8, 512), 32
SHAPES: dict[str, dict[str, int]] = {  # by --model-shape; the first is the default
    "bert-base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128},
}
VOCABULARY = 30_522
_SPECIAL = ["[PAD]", "[CLS]", "[SEP]"]
Vectors = npt.NDArray[np.float32]  # (texts, hidden)


@dataclass(frozen=True, slots=True)
class Job:
    """A job: two systems compute the same numbers from the same items."""

    what: str  # the numbers, in the plural
    peer: str
    draw: Callable[[int], Sequence[Any]]  # the items of a round
    write: Callable[[Path, str], None]  # a model of this shape
    open_engine: Callable[[EngineCore, Path], "Run"]
    open_peer: Callable[[Path, str], "Run"]  # with this number type
    about: Mapping[str, object]


Run = Callable[[Sequence[Any]], Vectors]  # returns a row for each item


def build_embed() -> Job:
    """Return the job in which texts become vectors."""
    sizes = {"texts": TEXTS, "tokens": TOKENS}
    return Job("vectors", "sentence-transformers", random_texts, write_encoder, open_engine, open_peer, sizes)


def measure_job(job: Job, shape: str, dtype: str, limits: Limits, report: Callable[[str], None]) -> dict[str, Any]:
    """Measure the seconds for all items with both systems. Exits if their numbers differ or the peer is missing."""
    if find_spec(job.peer.replace("-", "_")) is None:
        raise SystemExit(f"{job.peer} is missing: uv run --no-sync --with {job.peer} python -m ...")
    with TemporaryDirectory() as folder:
        compared = check_numbers(job, Path(folder))
    report(f"event={job.what}_equal dtype=float32 model=tiny {job.what}={compared}: same as {job.peer}'")
    with TemporaryDirectory() as folder:
        job.write(Path(folder), shape)
        report(f"event=model_written shape={shape}")
        core = open_core(Path(folder), dtype)
        ours, theirs = job.open_engine(core, Path(folder)), job.open_peer(Path(folder), dtype)
    items = job.draw(0)
    for system in (ours, theirs):
        system(items[:BATCH])
    runs: dict[str, Callable[[int], Figures]] = {
        OURS: lambda number: _time(ours, job.draw(number)),
        job.peer: lambda number: _time(theirs, job.draw(number)),
    }
    return {
        f"same_float32_{job.what}_as_{job.peer.replace('-', '_')}": True,
        **measure_rounds(in_turns(runs, Limit(core.executor).slice), limits, report),
        "workload": {"model_shape": shape, "dtype": dtype, **job.about},
    }


def _time(run: Run, items: Sequence[Any]) -> Figures:
    started = time.perf_counter()
    run(items)
    return {"all": time.perf_counter() - started}


def check_numbers(job: Job, folder: Path) -> int:
    """Compare the systems' numbers. Returns how many items were compared."""
    job.write(folder, "tiny")
    items = job.draw(1)[:BATCH]
    engine, peer = job.open_engine(open_core(folder, "float32"), folder), job.open_peer(folder, "float32")
    if np.abs(engine(items) - peer(items)).max() > 1e-4:
        raise SystemExit(f"float32 {job.what} differ from {job.peer}': one of them is wrong here")
    return len(items)


def random_texts(seed: int) -> list[str]:
    """Return random texts, each with a random number of tokens, including the two special ones of a BERT."""
    random = Random(seed)
    lengths = [random.randint(*TOKENS) for _ in range(TEXTS)]
    return [" ".join(f"w{random.randrange(len(_SPECIAL), VOCABULARY)}" for _ in range(n - 2)) for n in lengths]


def write_encoder(folder: Path, shape: str) -> None:
    """Write a model of random weights (seed 0), as sentence-transformers saves it. Each word of a text is a token."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    torch.manual_seed(0)
    config = BertConfig(**SHAPES[shape], vocab_size=VOCABULARY, initializer_range=0.1)
    with TemporaryDirectory() as plain:
        AutoModel.from_config(config).save_pretrained(plain)
        write_tokenizer(Path(plain))
        transformer = Transformer(plain, max_seq_length=TOKENS[1])
        modules = [transformer, Pooling(config.hidden_size, pooling_mode="mean"), Normalize()]
        SentenceTransformer(modules=modules, device="cpu").save(str(folder))


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer that splits words at spaces and adds BERT's two special tokens around a text."""
    words = [*_SPECIAL, *(f"w{number}" for number in range(len(_SPECIAL), VOCABULARY))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[PAD]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    named = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "model_max_length": TOKENS[1]}
    names = ["input_ids", "token_type_ids", "attention_mask"]
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=names, **named).save_pretrained(folder)


def open_core(folder: Path, dtype: str) -> EngineCore:
    """Open this engine with its defaults."""
    config = EngineConfig(
        model=str(folder),
        device="cpu",
        dtype=dtype,  # type: ignore[arg-type]  # argparse has checked it
        num_threads=torch.get_num_threads(),
    )
    return EngineCore(config, build_runner(config))


def open_engine(core: EngineCore, folder: Path) -> Run:
    """Return a function that runs this engine with the model's tokenizer."""
    tokenizer, payload = Tokenizer.from_file(str(folder / "tokenizer.json")), PoolingParams().encode()

    def embed(texts: Sequence[str]) -> Vectors:
        return run_all(core, ((encoding.ids, payload) for encoding in tokenizer.encode_batch_fast(texts)))

    return embed


def run_all(core: EngineCore, prompts: Iterable[tuple[list[int], bytes]]) -> Vectors:
    """Return the numbers for each prompt, which is (tokens, payload). All prompts arrive at once."""
    count = 0
    for token_ids, payload in prompts:
        core.add_request(EngineRequest(request_id=str(count), prompt_token_ids=token_ids, payload=payload))
        count += 1
    found: dict[str, bytes] = {}
    while core.has_unfinished():
        found |= {output.request_id: output.payload or b"" for output in core.step(time.monotonic())}
    return np.stack([np.frombuffer(found[str(number)], np.float32) for number in range(count)])


def open_peer(folder: Path, dtype: str) -> Run:
    """Open sentence-transformers as its users do."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": getattr(torch, dtype)})

    def embed(texts: Sequence[str]) -> Vectors:
        vectors: Vectors = model.encode(list(texts), batch_size=BATCH, show_progress_bar=False)
        return vectors

    return embed
