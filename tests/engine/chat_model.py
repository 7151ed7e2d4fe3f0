"""Makes a tiny model directory: random Llama weights, a tokenizer and a chat template."""

from pathlib import Path

CONTEXT_TOKENS = 8192
VOCABULARY = 384
END, USER, ASSISTANT = "<|end|>", "<|user|>", "<|assistant|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}" + END + "{% endfor %}"
    "{% if add_generation_prompt %}" + ASSISTANT + "{% endif %}"
)
TEXTS = [
    "the quick brown fox jumps over the lazy dog",
    "日本語のテキスト",
    "naïve café 🙂 déjà vu",
    "def f(x): return x + 1",
]


def write_tokenizer(directory: Path) -> None:
    """Write tokenizer.json and its companions. Each byte is a token. Does not use torch."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END, USER, ASSISTANT], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 20, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)


def write_chat_model(directory: Path) -> Path:
    """Write the whole model. Returns the directory."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    write_tokenizer(directory)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=False,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory
