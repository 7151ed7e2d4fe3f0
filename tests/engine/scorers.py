"""Makes tiny random causal models that rank, as sentence-transformers saves them, and computes transformers' logits.

The template is that of Qwen3-Reranker, with the special tokens of the tests' tokenizer.
"""

import json
from pathlib import Path
from typing import Any, Final

import torch
from tests.engine.chat_model import VOCABULARY, write_tokenizer
from tests.engine.encoders import save_encoder
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

YES, NO = 33, 77
INSTRUCTION: Final = "Given a search query, retrieve relevant passages"
TEMPLATE: Final = """\
{%- set instruction = messages | selectattr("role", "eq", "system") | map(attribute="content") | first
    | default("no instruction") -%}
{%- set query = messages | selectattr("role", "eq", "query") | map(attribute="content") | first -%}
{%- set document = messages | selectattr("role", "eq", "document") | map(attribute="content") | first -%}
<|user|>
<Instruct>: {{ instruction }}
<Query>: {{ query }}
<Document>: {{ document }}<|end|>
{%- if add_generation_prompt %}<|assistant|>
<think>

</think>

{% endif %}"""


def write_scorer(
    kind: str, directory: Path, *, tokens: tuple[int, int | None] = (YES, NO), template: str = TEMPLATE, **changes: Any
) -> PreTrainedModel:
    """Write a complete directory. Returns the model in float32."""
    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(directory)
    (directory / "chat_template.jinja").write_text(template)
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "max_position_embeddings": 512}
    model = save_encoder(kind, directory, AutoModelForCausalLM, **(sizes | changes))
    of_modules = [
        ("", "base.modules.transformer.Transformer"),
        ("1_LogitScore", "cross_encoder.modules.logit_score.LogitScore"),
    ]
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.{name}"}
        for number, (path, name) in enumerate(of_modules)
    ]
    write_json(directory / "modules.json", modules)
    (directory / "1_LogitScore").mkdir(exist_ok=True)
    write_json(directory / "1_LogitScore" / "config.json", {"true_token_id": tokens[0], "false_token_id": tokens[1]})
    prompts = {"model_type": "CrossEncoder", "prompts": {"search": INSTRUCTION}, "default_prompt_name": "search"}
    activation = {"activation_fn": "torch.nn.modules.linear.Identity"} if tokens[1] is None else {}
    write_json(directory / "config_sentence_transformers.json", prompts | activation)
    forward = {"method": "forward", "method_output_name": "logits"}
    limits = {
        "transformer_task": "text-generation",
        "modality_config": {"text": forward, "message": forward | {"format": "flat"}},
        "module_output_name": "causal_logits",
        "processing_kwargs": {"chat_template": {"add_generation_prompt": True}},
    }
    write_json(directory / "sentence_bert_config.json", limits)
    return model


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content))


class Scored:
    """A tiny model that ranks, and transformers' logits of pairs, one by one."""

    def __init__(self, kind: str, directory: Path, **changes: Any) -> None:
        self.directory, self.tokens = directory, changes.get("tokens", (YES, NO))
        self.model = write_scorer(kind, directory, **changes)
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory)

    def token_ids(self, query: str, document: str, instruction: str = INSTRUCTION) -> list[int]:
        texts = {"system": instruction, "query": query, "document": document}
        messages = [{"role": role, "content": text} for role, text in texts.items()]
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def logit(self, token_ids: list[int]) -> float:
        with torch.inference_mode():
            last = self.model(input_ids=torch.tensor([token_ids])).logits[0, -1]
        return float(last[self.tokens[0]] - (0 if self.tokens[1] is None else last[self.tokens[1]]))
