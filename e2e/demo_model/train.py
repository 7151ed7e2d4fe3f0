"""Train tokenizer and model and save both as transformers does. Called by `e2e.demo_model`.

Fixed steps and seed: the same machine gives the same weights. On one thread unless OMP_NUM_THREADS is set: the set-up's
other steps have the cores, and two threads that wait for each other on a busy core are slower than one.

Most of the time goes into the answers, which are few. The many ways to ask for one only decide how it begins. So every
second step has more conversations, cut off soon after the question.
"""

import itertools
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from e2e.demo_model.corpus import ASSISTANT, END, QUESTIONS, USER, Topic, answer_text, build_topics, question_text

SEED = 20261121
VOCABULARY = 2048
ROWS = 8  # whole conversations per step
BEGINNINGS = 32  # conversations per step that has their beginnings
BEGINNING_TOKENS = 6  # of the answer
WHOLE_FIRST = 24  # steps without beginnings
STEPS = 140
LEARNING_RATE = 2.5e-3
INITIAL_DEVIATION = 0.06  # of the weights. With the usual 0.02, the first hundred steps learn little
CONTINUATIONS = 0.1  # share of the rows that are an answer without a question
IGNORED = -100  # label of what is not to be learnt: padding and questions
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}" + USER + "{{ message['content'] }}" + END + ""
    "{% elif message['role'] == 'assistant' %}" + ASSISTANT + "{{ message['content'] }}" + END + ""
    "{% endif %}{% endfor %}"  # the model has never seen a system message: it is left out
    "{% if add_generation_prompt %}" + ASSISTANT + "{% endif %}"
)


def train(directory: Path, progress: Callable[[str], None]) -> None:
    """Leave a model directory (safetensors, tokenizer, chat template) in `directory`, readable by everybody."""
    random.seed(SEED)
    torch.manual_seed(SEED)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))
    all_topics = build_topics()
    tokenizer = _train_tokenizer(all_topics)
    tokenizer.save_pretrained(directory)
    model = LlamaForCausalLM(_shape(tokenizer))
    parameters = sum(p.numel() for p in model.parameters())
    progress(f"{parameters / 1e6:.1f} M parameters, {len(all_topics)} topics, {STEPS} steps")
    _learn(model, _batches(all_topics, tokenizer), progress)
    model.eval()
    model.save_pretrained(directory)
    for file in directory.iterdir():
        file.chmod(0o644)  # pods read it as another user


def _train_tokenizer(all_topics: list[Topic]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([topic.answer for topic in all_topics], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _batches(
    all_topics: list[Topic], tokenizer: PreTrainedTokenizerFast
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless (input ids, labels), both (rows, longest). A row is one conversation: the answer is never learnt without
    the question that it belongs to.
    """
    whole = _deal(all_topics)
    for step in itertools.count():
        if step < WHOLE_FIRST or step % 2 == 0:
            yield _batch([(_random_question(topic, CONTINUATIONS), topic) for topic in next(whole)], tokenizer)
        else:
            topics = random.sample(all_topics, BEGINNINGS)
            yield _batch([(_random_question(topic), topic) for topic in topics], tokenizer, BEGINNING_TOKENS)


def _deal(all_topics: list[Topic]) -> Iterator[list[Topic]]:
    """Endless groups of ROWS topics. Each round has nearly every topic once. Answers of a group have similar lengths,
    so that they need little padding.
    """
    while True:
        chosen = random.sample(all_topics, len(all_topics) // ROWS * ROWS)
        chosen.sort(key=lambda topic: len(topic.answer) * random.uniform(0.8, 1.25))
        groups = [chosen[first : first + ROWS] for first in range(0, len(chosen), ROWS)]
        yield from random.sample(groups, len(groups))


def _batch(
    rows: list[tuple[str, Topic]], tokenizer: PreTrainedTokenizerFast, answer_tokens: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return input ids and labels for these questions, and the first tokens of their answers (None: all)."""
    questions = tokenizer([question for question, _ in rows], add_special_tokens=False)["input_ids"]
    texts = tokenizer([answer_text(topic) for _, topic in rows], add_special_tokens=False)["input_ids"]
    answers = [text[:answer_tokens] for text in texts]
    longest = max(len(q) + len(a) for q, a in zip(questions, answers, strict=True))
    inputs, labels = [], []
    for question, answer in zip(questions, answers, strict=True):
        padding = longest - len(question) - len(answer)
        inputs.append(question + answer + [tokenizer.pad_token_id] * padding)
        labels.append([IGNORED] * len(question) + answer + [IGNORED] * padding)
    return torch.tensor(inputs), torch.tensor(labels)


def _random_question(topic: Topic, continuations: float = 0.0) -> str:
    """Return a question, or with this probability none: the answer then continues a prompt that is no chat."""
    if random.random() < continuations:
        return ""
    name = random.choice(topic.names)
    return question_text(name, random.choice(QUESTIONS))


def _shape(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        initializer_range=INITIAL_DEVIATION,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def _learn(
    model: LlamaForCausalLM, batches: Iterator[tuple[torch.Tensor, torch.Tensor]], progress: Callable[[str], None]
) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _learning_rate)
    began = time.monotonic()
    for step, (inputs, labels) in zip(range(1, STEPS + 1), batches, strict=False):
        loss = model(input_ids=inputs, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step == 1 or step % 50 == 0:
            progress(f"step {step}/{STEPS}, loss {loss.item():.2f}, {time.monotonic() - began:.0f} s")


def _learning_rate(step: int) -> float:
    """Return the share of the highest rate: a short warm-up, then a line to nearly zero."""
    return min((step + 1) / 8, 1.02 - step / STEPS)
