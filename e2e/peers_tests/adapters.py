"""Makes the LoRA adapter that replaces those of vLLM's tests. It changes nothing, so that the answers stay known."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

RANK = 8


def make(folder: Path, model: Path) -> None:
    """Write the adapter for the queries of each layer of `model` into `folder`, in PEFT's format."""
    config = json.loads((model / "config.json").read_text())
    outputs = config["num_attention_heads"] * config["head_dim"]
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        weights[f"{name}.lora_A.weight"] = torch.ones(RANK, config["hidden_size"])
        weights[f"{name}.lora_B.weight"] = torch.zeros(outputs, RANK)
    save_file(weights, folder / "adapter_model.safetensors")
    adapter = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": ["q_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
