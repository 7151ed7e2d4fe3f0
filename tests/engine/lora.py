"""Saves LoRA adapters of tiny models with PEFT, and answers with them as PEFT does."""

import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tests.engine.references import MAX_TOKENS
from tests.engine.tiny_models import greedy
from transformers import AutoModelForCausalLM, PreTrainedModel

ALL = "all-linear"  # of PEFT: each linear layer but the head


def load(directory: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    return model.eval()


def save_adapter(model: Path, folder: Path, seed: int, **config: Any) -> PreTrainedModel:
    """Save a random adapter of the model in `model`. Return the model with it, as PEFT computes it."""
    torch.manual_seed(seed)
    values = {"r": 4, "lora_alpha": 12, "target_modules": ALL, "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT uses a property that transformers has renamed
        adapted = get_peft_model(load(model), LoraConfig(**(values | config)))
    adapted.save_pretrained(folder)
    base: PreTrainedModel = adapted.base_model.model
    return base.eval()


def answer(model: PreTrainedModel, prompts: list[list[int]]) -> list[list[int]]:
    return [greedy(model, prompt, MAX_TOKENS) for prompt in prompts]
