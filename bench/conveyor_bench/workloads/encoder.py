"""Workload embed: texts of 8 to 512 tokens through a BERT, against sentence-transformers' own `encode`.

`encode` sorts by length and pads batches of 32. Both begin with texts, and have to agree on the vectors of a small
float32 model first.
"""

import time
from collections.abc import Callable, Sequence
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
from conveyor_engine.wire.embedding import PoolingParams
from conveyor_engine.wire.request import EngineRequest

TEXTS, TOKENS, BATCH = 128, (8, 512), 32
SHAPES: dict[str, dict[str, int]] = {  # by --model-shape; the first is bert-base's
    "bert-base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128},
}
VOCABULARY = 30_522
_SPECIAL = ["[PAD]", "[CLS]", "[SEP]"]
Vectors = npt.NDArray[np.float32]  # (texts, hidden)


def measure_encoder(shape: str, dtype: str, limits: Limits, say: Callable[[str], None]) -> dict[str, Any]:
    """Seconds for all texts, of both. Exits if the systems differ, or the peer is missing."""
    if find_spec("sentence_transformers") is None:
        raise SystemExit(
            "sentence-transformers is missing: uv run --no-sync --with sentence-transformers python -m ..."
        )
    with TemporaryDirectory() as folder:
        compared = check_vectors(Path(folder))
    say(f"event=vectors_equal dtype=float32 model=tiny vectors={compared}: same as sentence-transformers'")
    with TemporaryDirectory() as folder:
        write_encoder(Path(folder), shape)
        say(f"event=model_written shape={shape}")
        core = open_core(Path(folder), dtype)
        ours, theirs = open_engine(core, Path(folder)), open_peer(Path(folder), dtype)
    texts = random_texts(0)
    for system in (ours, theirs):
        system(texts[:BATCH])
    runs: dict[str, Callable[[int], Figures]] = {
        OURS: lambda number: _time(ours, number),
        "sentence-transformers": lambda number: _time(theirs, number),
    }
    return {
        "same_float32_vectors_as_sentence_transformers": True,
        **measure_rounds(in_turns(runs, Limit(core.executor).slice), limits, say),
        "workload": {"model_shape": shape, "dtype": dtype, "texts": TEXTS, "tokens": TOKENS},
    }


Embed = Callable[[Sequence[str]], Vectors]


def _time(embed: Embed, number: int) -> Figures:
    texts = random_texts(number)
    started = time.perf_counter()
    embed(texts)
    return {"all": time.perf_counter() - started}


def check_vectors(folder: Path) -> int:
    """How many were compared."""
    write_encoder(folder, "tiny")
    texts = random_texts(1)[:BATCH]
    engine, peer = open_engine(open_core(folder, "float32"), folder), open_peer(folder, "float32")
    ours, theirs = engine(texts), peer(texts)
    if np.abs(ours - theirs).max() > 1e-4:
        raise SystemExit("float32 vectors differ from sentence-transformers': one of them is wrong here")
    return len(texts)


def random_texts(seed: int) -> list[str]:
    """Of so many tokens with the two that a BERT adds."""
    random = Random(seed)
    lengths = [random.randint(*TOKENS) for _ in range(TEXTS)]
    return [" ".join(f"w{random.randrange(len(_SPECIAL), VOCABULARY)}" for _ in range(n - 2)) for n in lengths]


def write_encoder(folder: Path, shape: str) -> None:
    """A model of random weights (seed 0), as sentence-transformers saves it. A word of its texts is a token."""
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
    """Words at spaces, between BERT's two special tokens."""
    words = [*_SPECIAL, *(f"w{number}" for number in range(len(_SPECIAL), VOCABULARY))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[PAD]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    pair = [("[CLS]", 1), ("[SEP]", 2)]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=pair)
    named = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "model_max_length": TOKENS[1]}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(folder)


def open_core(folder: Path, dtype: str) -> EngineCore:
    """This engine, with its defaults."""
    config = EngineConfig(
        model=str(folder),
        device="cpu",
        dtype=dtype,  # type: ignore[arg-type]  # argparse has checked it
        num_threads=torch.get_num_threads(),
    )
    return EngineCore(config, build_runner(config))


def open_engine(core: EngineCore, folder: Path) -> Embed:
    """This engine with the model's own tokenizer."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def embed(texts: Sequence[str]) -> Vectors:
        for number, encoding in enumerate(tokenizer.encode_batch_fast(texts)):
            request = EngineRequest(
                request_id=str(number), prompt_token_ids=encoding.ids, payload=PoolingParams().encode()
            )
            core.add_request(request)
        found: dict[str, bytes] = {}
        while core.has_unfinished():
            found |= {output.request_id: output.payload or b"" for output in core.step(time.monotonic())}
        return np.stack([np.frombuffer(found[str(number)], np.float32) for number in range(len(texts))])

    return embed


def open_peer(folder: Path, dtype: str) -> Embed:
    """sentence-transformers, as its users call it."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": getattr(torch, dtype)})

    def embed(texts: Sequence[str]) -> Vectors:
        vectors: Vectors = model.encode(list(texts), batch_size=BATCH, show_progress_bar=False)
        return vectors

    return embed
