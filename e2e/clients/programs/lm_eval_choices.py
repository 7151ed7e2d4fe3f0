"""lm-eval: compares a task's log likelihoods with those of lm-eval's transformers backend for the same weights."""

import sys
from pathlib import Path

import lm_eval
from checks import MODEL, URL, run
from lm_eval.tasks import TaskManager

DIRECTORY = sys.argv[3]
TASK, LARGEST_DIFFERENCE = "conveyor_choose", 0.15  # in nats for a whole answer; the engine may compute in bfloat16


def measure(model: str, arguments: str) -> list[list[tuple[float, bool]]]:
    """Return (log likelihood, whether it is the greedy answer) for each answer of each question."""
    manager = TaskManager(include_path=str(Path(__file__).parent / "lm_eval_tasks"))
    found = lm_eval.simple_evaluate(
        model=model, model_args=arguments, tasks=[TASK], task_manager=manager, device="cpu", bootstrap_iters=0
    )
    samples = sorted(found["samples"][TASK], key=lambda sample: sample["doc_id"])
    return [[tuple(answer) for answer in sample["filtered_resps"]] for sample in samples]


def loglikelihoods() -> None:
    served = measure(
        "local-completions",
        f"model={MODEL},base_url={URL}/completions,tokenizer={DIRECTORY},num_concurrent=2,tokenized_requests=False",
    )
    own = measure("hf", f"pretrained={DIRECTORY},dtype=float32")
    assert len(served) == len(own) == 4
    for ours, theirs in zip(served, own, strict=True):
        for (our_value, _), (their_value, _) in zip(ours, theirs, strict=True):
            assert abs(float(our_value) - float(their_value)) < LARGEST_DIFFERENCE, (our_value, their_value)
        best = [max(range(len(each)), key=lambda index: float(each[index][0])) for each in (ours, theirs)]
        assert best[0] == best[1]


run(loglikelihoods)
