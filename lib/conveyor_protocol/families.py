"""The families of text models that CI tests, by the `model_type` in config.json, and the pipelines that make pictures.

The page docs/model-families.md, `python -m conveyor_engine check` and `kubectl conveyor models` show this table. Each
row has a tiny random model in the engine's tests, which compare the row with that model. Other families may run too.
"""

from typing import Final, Literal, NamedTuple

Task = Literal["Generate", "Embed", "Rerank", "Classify"]
# The largest parts of decoder layers that the engine's own code computes. `mixers` are layers with a state.
Replaced = Literal["layers", "attention", "latents", "mixers", "parts"]
MEANINGS: Final[dict[Replaced, str]] = {
    "layers": "whole layers",
    "attention": "attention, and smaller parts",
    "latents": "attention over latents, and smaller parts",
    "mixers": "layers with a state, and smaller parts",
    "parts": "linear layers, norms or MLPs",
}


class Family(NamedTuple):
    """A row of the table."""

    name: str
    tasks: tuple[Task, ...]  # with which it is tested
    replaced: Replaced | None = None  # on CPUs, when it generates; None: it is not tested with this task


FAMILIES: Final[dict[str, Family]] = {
    "bamba": Family("Bamba", ("Generate",), "mixers"),
    "bert": Family("BERT", ("Embed", "Rerank", "Classify")),
    "cohere2": Family("Command R7B and A", ("Generate",), "parts"),
    "deberta": Family("DeBERTa", ("Rerank", "Classify")),
    "deberta-v2": Family("DeBERTa v2 and v3", ("Embed", "Rerank", "Classify")),
    "deepseek_v2": Family("DeepSeek-V2", ("Generate",), "latents"),
    "deepseek_v3": Family("DeepSeek-V3, R1 and Kimi-K2", ("Generate",), "latents"),
    "distilbert": Family("DistilBERT", ("Rerank", "Classify")),
    "falcon_h1": Family("Falcon-H1", ("Generate",), "mixers"),
    "gemma": Family("Gemma", ("Generate",), "layers"),
    "gemma2": Family("Gemma 2", ("Generate", "Rerank"), "layers"),
    "gemma3": Family("Gemma 3", ("Generate",), "layers"),
    "gemma3_text": Family("Gemma 3, texts only", ("Generate", "Embed"), "layers"),
    "gemma4_text": Family("Gemma 4, texts only", ("Generate",), "parts"),
    "glm4": Family("GLM-4", ("Generate",), "parts"),
    "glm4_moe_lite": Family("GLM-4.7-Flash", ("Generate",), "latents"),
    "gpt2": Family("GPT-2", ("Generate",), "parts"),
    "gpt_neox": Family("GPT-NeoX and Pythia", ("Generate",), "parts"),
    "gpt_oss": Family("gpt-oss", ("Generate",), "parts"),
    "granite": Family("Granite 3", ("Generate",), "layers"),
    "granite_swa": Family("Granite with windows", ("Generate",), "parts"),
    "granitemoehybrid": Family("Granite 4", ("Generate",), "mixers"),
    "internvl": Family("InternVL", ("Generate",), "layers"),
    "lfm2": Family("LFM2", ("Generate",), "mixers"),
    "lfm2_moe": Family("LFM2 with experts", ("Generate",), "mixers"),
    "llama": Family("Llama 2 to 3.3", ("Generate", "Rerank", "Classify"), "layers"),
    "llava_onevision": Family("LLaVA-OneVision", ("Generate",), "layers"),
    "mimo_v2_flash": Family("MiMo-V2-Flash", ("Generate",), "parts"),
    "minicpm3": Family("MiniCPM3", ("Generate",), "latents"),
    "ministral": Family("Ministral", ("Generate",), "layers"),
    "mistral": Family("Mistral 7B", ("Generate", "Embed"), "layers"),
    "mistral3": Family("Mistral Small 3", ("Generate",), "layers"),
    "mixtral": Family("Mixtral", ("Generate",), "attention"),
    "modernbert": Family("ModernBERT", ("Embed", "Rerank", "Classify")),
    "mpnet": Family("MPNet", ("Embed", "Rerank", "Classify")),
    "nemotron_h": Family("Nemotron-H", ("Generate",), "mixers"),
    "olmo2": Family("OLMo 2", ("Generate",), "parts"),
    "olmo_hybrid": Family("OLMo-hybrid", ("Generate",), "mixers"),
    "opt": Family("OPT", ("Generate",), "parts"),
    "phi": Family("Phi 1 to 2", ("Generate",), "parts"),
    "phi3": Family("Phi 3 and 4", ("Generate",), "layers"),
    "qwen2": Family("Qwen2 and 2.5", ("Generate",), "layers"),
    "qwen2_5_vl": Family("Qwen2.5-VL", ("Generate",), "layers"),
    "qwen3": Family("Qwen3", ("Generate", "Embed", "Rerank", "Classify"), "layers"),
    "qwen3_5_moe": Family("Qwen3.5 and 3.6 with experts", ("Generate",), "mixers"),
    "qwen3_5_moe_text": Family("Qwen3.5 and 3.6 with experts, texts only", ("Generate",), "mixers"),
    "qwen3_5_text": Family("Qwen3.5 and 3.6, texts only", ("Generate",), "mixers"),
    "qwen3_moe": Family("Qwen3 with experts", ("Generate",), "attention"),
    "qwen3_next": Family("Qwen3-Next", ("Generate",), "mixers"),
    "qwen3_vl": Family("Qwen3-VL", ("Generate",), "layers"),
    "starcoder2": Family("Starcoder2", ("Generate",), "attention"),
    "xlm-roberta": Family("XLM-RoBERTa", ("Embed", "Rerank", "Classify")),
}


class VectorKind(NamedTuple):
    """Models that make other vectors than one for each text, recognised by their files."""

    files: str
    paths: tuple[str, ...]
    families: tuple[str, ...]  # with which it is tested


VECTORS: Final[dict[str, VectorKind]] = {
    "SPLADE": VectorKind(
        "`SpladePooling` in `modules.json`, or a masked language model without `modules.json`",
        ("/embed_sparse",),
        ("bert", "modernbert", "xlm-roberta"),
    ),
    "ColBERT": VectorKind(
        "`Dense` and no `Pooling` in `modules.json`, or the class `HF_ColBERT`",
        ("/pooling", "/score", "/rerank"),
        ("bert", "modernbert"),
    ),
    "BGE-M3": VectorKind(
        "`sparse_linear.pt` and `colbert_linear.pt`", ("/embed_sparse", "/pooling", "/v1/embeddings"), ("xlm-roberta",)
    ),
}
# The pipelines of diffusers that the task ImageGenerate runs, by their class in model_index.json.
PIPELINES: Final[dict[str, str]] = {
    "FluxPipeline": "FLUX.1",
    "StableDiffusion3Pipeline": "Stable Diffusion 3 and 3.5",
    "StableDiffusionPipeline": "Stable Diffusion 1.4 to 2.1",
    "StableDiffusionXLPipeline": "Stable Diffusion XL",
}
