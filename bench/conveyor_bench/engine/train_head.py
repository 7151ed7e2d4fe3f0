"""Trains an EAGLE-3 head for a small chat model. Called by `speculation`, which then measures drafts with it.

The head learns the model's own greedy answers to questions about Python's modules. `speculation` asks about other
things. The files are those of the EAGLE authors, so that the engine reads them as published ones.
"""

import json
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from random import Random

import torch
from safetensors.torch import save_file
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from conveyor_engine.execution.models.eagle import EagleHead
from conveyor_engine.text.tokenizer import Tokenizer

ANSWER_TOKENS, QUESTIONS, ROWS, LEARNING_RATE = 80, 160, 16, 2e-3


def answer(model: PreTrainedModel, questions: Sequence[list[int]]) -> list[list[int]]:
    """Return each question with the model's greedy answer."""
    longest = max(map(len, questions))
    padded = torch.tensor([[0] * (longest - len(each)) + each for each in questions])
    mask = torch.tensor([[0] * (longest - len(each)) + [1] * len(each) for each in questions])
    with torch.inference_mode():
        answers = model.generate(padded, attention_mask=mask, max_new_tokens=ANSWER_TOKENS, do_sample=False)
    texts = [text[longest - len(each) :] for each, text in zip(questions, answers.tolist(), strict=True)]
    end = model.config.eos_token_id
    return [text[: text.index(end, 1) + 1] if end in text[1:] else text for text in texts]


def train(model: PreTrainedModel, texts: Sequence[list[int]], layers: Sequence[int], steps: int) -> EagleHead:
    """Return a head that reads the inputs of these layers. Its tokens are all tokens of the model."""
    config, random = model.config, Random(0)
    torch.manual_seed(0)
    values = LlamaConfig(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        num_hidden_layers=1,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        initializer_range=0.06,
    )
    values.target_hidden_size, values.num_guessed, values.num_embedded = config.hidden_size, config.vocab_size, 0
    head = EagleHead(values)
    head.set_input_embeddings(model.get_input_embeddings())
    head.lm_head.weight.data = model.get_output_embeddings().weight.data.clone()
    head.model.embed_tokens.requires_grad_(False)
    optimizer = torch.optim.AdamW([each for each in head.parameters() if each.requires_grad], lr=LEARNING_RATE)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * (1 - step / steps)
        loss = torch.zeros(())
        for text in random.sample(texts, ROWS):
            ids = torch.tensor([text])
            with torch.no_grad():
                states = model(input_ids=ids, output_hidden_states=True).hidden_states
            joined = torch.cat([states[layer] for layer in layers], dim=-1)[:, :-2]
            logits = head(input_ids=ids[:, 1:-1], hidden_states=joined).logits
            loss = loss + functional.cross_entropy(logits[0], ids[0, 2:]) / ROWS
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % 20 == 0:
            print(f"event=step number={step} loss={loss.item():.3f}", flush=True)
    return head


def save(head: EagleHead, directory: Path, layers: Sequence[int]) -> None:
    """Save the head as its authors do."""
    directory.mkdir(parents=True, exist_ok=True)
    names = {name: name.removeprefix("model.").replace("layers.0.", "midlayer.") for name, _ in head.named_parameters()}
    weights = {names[name]: each.data.contiguous() for name, each in head.named_parameters() if "embed" not in name}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    content = head.config.to_dict() | {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
    content["eagle_aux_hidden_state_layer_ids"] = [*layers]
    (directory / "config.json").write_text(json.dumps(content))


def train_head(directory: Path, out: Path, steps: int, excluded: Collection[str]) -> None:
    """Train a head for the chat model in `directory` and save it. excluded: what the questions are not about."""
    tokenizer = Tokenizer(directory)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    modules = sorted(name for name in sys.stdlib_module_names if name.strip("_") == name and name not in excluded)
    prompts = [f"<|user|>Tell me about {name}.<|assistant|>" for name in modules[:QUESTIONS]]
    texts = answer(model, [tokenizer.encode(prompt, ANSWER_TOKENS) for prompt in prompts])
    number = model.config.num_hidden_layers
    layers = [min(1, number - 1), number // 2, number - 1]
    save(train(model, [text for text in texts if len(text) > 8], layers, steps), out, layers)
