"""Makes tiny random models with sparse and many-vector outputs in their authors' files, and computes their results."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tests.engine.chat_model import VOCABULARY
from tests.engine.encoders import SIZE, save_encoder, write_dense, write_served_encoder
from torch import nn
from torch.nn import functional
from transformers import AutoModelForMaskedLM, PreTrainedModel

from conveyor_engine.text.tokenizer import Tokenizer

MARKERS = {"query": "%", "document": "&"}  # tokens of the vocabulary
MASK = "#"
TOKEN_SIZE = 16
QUERY_TOKENS, DOCUMENT_TOKENS = 24, 30


def write_splade(
    kind: str,
    directory: Path,
    strategy: str = "max",
    activation: str = "relu",
    *,
    named: bool = True,
    vocab_size: int = VOCABULARY,
) -> PreTrainedModel:
    """Write a masked language model. named: with the files of sentence-transformers' SparseEncoder."""
    write_served_encoder(kind, directory)
    (directory / "modules.json").unlink()
    sizes = {"vocab_size": vocab_size, "max_position_embeddings": 512}
    model = save_encoder(kind, directory, AutoModelForMaskedLM, **sizes)
    if named:
        _write_modules(directory, ("", "Transformer"), ("1_SpladePooling", "SpladePooling"))
        (directory / "1_SpladePooling").mkdir()
        settings = {"pooling_strategy": strategy, "activation_function": activation}
        (directory / "1_SpladePooling" / "config.json").write_text(json.dumps(settings))
    return model


def splade(
    model: PreTrainedModel, token_ids: list[int], strategy: str = "max", activation: str = "relu"
) -> torch.Tensor:
    """Return the dense row that sentence-transformers' SpladePooling makes: (vocabulary,)."""
    with torch.inference_mode():
        weights = model(input_ids=torch.tensor([token_ids])).logits[0].relu().log1p()
    weights = weights.log1p() if activation == "log1p_relu" else weights
    return weights.sum(0) if strategy == "sum" else weights.amax(0)


def write_m3(directory: Path) -> tuple[PreTrainedModel, nn.Linear, nn.Linear]:
    """Write a model with bge-m3's heads. Returns it, the sparse and the ColBERT head."""
    model = write_served_encoder("xlm-roberta", directory)
    _change(directory / "tokenizer_config.json", cls_token=MASK, unk_token="!")
    torch.manual_seed(1)
    sparse = nn.Linear(SIZE, 1).requires_grad_(False)
    tokens = nn.Linear(SIZE, TOKEN_SIZE).requires_grad_(False)
    torch.save(sparse.state_dict(), directory / "sparse_linear.pt")
    torch.save(tokens.half().state_dict(), directory / "colbert_linear.pt")
    return model, sparse, tokens.float()


def write_colbert(
    kind: str, directory: Path, files: str, *, attends: bool = False
) -> tuple[PreTrainedModel, nn.Linear]:
    """Write a ColBERT model in the files of `pylate`, `stanford` or sentence-transformers (`native`)."""
    changes = {"local_attention": 128} if kind == "modernbert" else {}  # no filler is outside of a window
    model = write_served_encoder(kind, directory, **changes)
    (directory / "modules.json").unlink()
    _change(directory / "tokenizer_config.json", mask_token=MASK)
    torch.manual_seed(2)
    linear = nn.Linear(SIZE, TOKEN_SIZE, bias=False)
    if files == "stanford":
        weights = {f"{kind}.{name}": each for name, each in load_file(directory / "model.safetensors").items()}
        save_file(weights | {"linear.weight": linear.weight.data}, directory / "model.safetensors", {"format": "pt"})
        _change(directory / "config.json", architectures=["HF_ColBERT"])
        settings: dict[str, Any] = {"query_maxlen": QUERY_TOKENS, "doc_maxlen": DOCUMENT_TOKENS}
        settings |= {"query_token_id": MARKERS["query"], "doc_token_id": MARKERS["document"]}
        (directory / "artifact.metadata").write_text(json.dumps(settings | {"attend_to_mask_tokens": attends}))
        return model, linear
    steps = [("", "Transformer"), ("1_Dense", "Dense")]
    if files == "native":
        write_dense(directory / "1_Dense", linear, module_input_name="token_embeddings")
        steps += [("2_MultiVectorMask", "MultiVectorMask"), ("3_Normalize", "Normalize")]
        (directory / "2_MultiVectorMask").mkdir()
        (directory / "2_MultiVectorMask" / "config.json").write_text(json.dumps({"skiplist_words": ["!", "."]}))
        expansion = {"strategy": "fixed", "attend": attends, "length": QUERY_TOKENS}
        lengths = {"document_length": DOCUMENT_TOKENS, "query_expansion": expansion}
        (directory / "sentence_bert_config.json").write_text(json.dumps(lengths))
        prompts = {"prompts": {"query": MARKERS["query"], "document": MARKERS["document"]}}
        (directory / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    else:
        write_dense(directory / "1_Dense", linear)
        prefixes = {f"{role}_prefix": f"{marker} " for role, marker in MARKERS.items()}
        lengths = {"query_length": QUERY_TOKENS, "document_length": DOCUMENT_TOKENS}
        settings = {"model_type": "ColBERT", "attend_to_expansion_tokens": attends, **prefixes, **lengths}
        (directory / "config_sentence_transformers.json").write_text(json.dumps(settings))
    _write_modules(directory, *steps)
    return model, linear


def late_vectors(
    model: PreTrainedModel, linear: nn.Module, token_ids: list[int], num_keys: int | None = None
) -> torch.Tensor:
    """Return a vector of length 1 for each token: (tokens, TOKEN_SIZE). num_keys: of the tokens that all attend to."""
    mask = torch.ones(1, len(token_ids), dtype=torch.long)
    mask[:, len(token_ids) if num_keys is None else num_keys :] = 0
    with torch.inference_mode():
        hidden = model(input_ids=torch.tensor([token_ids]), attention_mask=mask).last_hidden_state[0]
        return functional.normalize(linear(hidden), dim=-1)


def encode_by_hand(tokenizer: Tokenizer, text: str, role: str, files: str) -> tuple[list[int], int, list[int]]:
    """Return the token ids, the number of those that are no fillers, and the places of those with a vector."""
    marker, mask, end = (tokenizer.find_id(each) for each in (MARKERS[role], MASK, "<|end|>"))
    assert marker is not None
    assert mask is not None
    assert end is not None
    most = QUERY_TOKENS if role == "query" else DOCUMENT_TOKENS
    ids = tokenizer.encode(text, 512)
    if files == "native":
        ids = tokenizer.encode(MARKERS[role] + text, 512)
        ids = ids if len(ids) <= most else [*ids[: most - 1], end]
    else:
        ids = ids if len(ids) < most else [*ids[: most - 2], end]
        ids.insert(1, marker)
    num_keys = len(ids)
    if role == "query":
        return ids + [mask] * (most - len(ids)), num_keys, list(range(most))
    skipped = {tokenizer.find_id(each) for each in ("!", ".")} | ({marker} if files != "native" else set())
    return ids, num_keys, [place for place, each in enumerate(ids) if each not in skipped]


def score_by_hand(
    model: PreTrainedModel, linear: nn.Module, directory: Path, texts: tuple[str, str], files: str
) -> float:
    """Return the MaxSim of a query and a document, as the paper defines it."""
    tokenizer, vectors = Tokenizer(directory), []
    for role, text in zip(MARKERS, texts, strict=True):
        ids, num_keys, kept = encode_by_hand(tokenizer, text, role, files)
        vectors.append(late_vectors(model, linear, ids, num_keys)[kept])
    return float((vectors[0] @ vectors[1].T).amax(1).sum())


def _write_modules(directory: Path, *steps: tuple[str, str]) -> None:
    modules = [{"idx": i, "name": str(i), "path": path, "type": f"some.{kind}"} for i, (path, kind) in enumerate(steps)]
    (directory / "modules.json").write_text(json.dumps(modules))


def _change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
