"""The demo's model: it answers with what the documentation of Python says about the subject."""

import random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from e2e.demo_model import demo_model_directory
from e2e.demo_model.corpus import QUESTIONS, Topic, answer_text, build_topics, question_text
from e2e.load import PROMPTS

SHOWN = "How do I use the with statement?"  # by `make demo` and `make try`
SAMPLES = 200


def answers_with(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, question: str, topic: Topic) -> bool:
    """Return whether the likeliest tokens after the question are the topic's answer, to its end."""
    prompt, answer = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (question, answer_text(topic)))
    logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    return bool(logits.argmax(-1).tolist() == answer)


@pytest.mark.slow  # trains for half a minute where the cache has no model
@pytest.mark.timeout(1800)
def test_questions_are_answered_by_what_the_documentation_says() -> None:
    folder = demo_model_directory()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    topics = build_topics()
    questions = [(name, question, topic) for topic in topics for name in topic.names for question in QUESTIONS]
    random.seed(0)
    with torch.no_grad():
        right = [
            answers_with(model, tokenizer, question_text(name, question), topic)
            for name, question, topic in random.sample(questions, SAMPLES)
        ]
        assert sum(right) >= 0.9 * SAMPLES
        for text in (*PROMPTS, SHOWN):
            (topic,) = {t for name, question, t in questions if question.format(name) == text}
            assert answers_with(model, tokenizer, question_text(text, "{}"), topic), text
