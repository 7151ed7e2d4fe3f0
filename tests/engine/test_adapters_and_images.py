"""Checks that rows with images and a LoRA adapter give the greedy tokens of PEFT, beside rows without an adapter."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests.engine.execution.test_sight import SeeingReference, add, pytestmark  # noqa: F401
from tests.engine.references import run, tokens_of
from transformers import AutoModelForImageTextToText

FURTHER = ("qwen2_5_vl", "qwen3_vl", "idefics3", "gemma3", "mistral3")
LAYERS = r".*(language_model|text_model)\..*(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # PEFT uses it
@pytest.mark.parametrize("kind", ["llava", *(pytest.param(kind, marks=pytest.mark.slow) for kind in FURTHER)])
def test_rows_with_images_and_an_adapter_give_the_tokens_of_peft(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_kind = SeeingReference(kind, tmp_path / "model")
    model = AutoModelForImageTextToText.from_pretrained(of_kind.directory, attn_implementation="eager").eval()
    torch.manual_seed(1)
    peft = get_peft_model(model, LoraConfig(r=4, lora_alpha=12, target_modules=LAYERS, init_lora_weights=False))
    peft.save_pretrained(tmp_path / "adapter")
    with monkeypatch.context() as adapted:
        adapted.setattr(of_kind, "model", peft.base_model.model.eval())
        expected = [of_kind.generate(*prompt) for prompt in of_kind.prompts]
    assert all(one != other for one, other in zip(expected, of_kind.answers, strict=True))
    core = of_kind.make_core(adapters=(("a", str(tmp_path / "adapter")),), max_num_seqs=8)
    for number, prompt in enumerate(of_kind.prompts):
        for adapter in (0, 1):
            add(core, f"{number} {adapter}", prompt, adapter)
    outputs = run(core)
    for adapter, wanted in enumerate((of_kind.answers, expected)):
        assert [tokens_of(outputs[f"{number} {adapter}"]) for number in range(len(wanted))] == wanted
