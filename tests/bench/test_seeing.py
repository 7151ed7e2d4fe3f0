"""The prompts of workload `see`."""

from pathlib import Path

from conveyor_bench.workloads.seeing import SHAPES, draw, write_model
from conveyor_engine.tasks.generate.chat_pictures import load_chat_pictures


def test_each_number_has_prompts_of_its_own(tmp_path: Path) -> None:
    """Peers with a prefix cache would otherwise have computed one of 16 before."""
    shape = SHAPES["tiny"]
    write_model(tmp_path, shape)
    reader = load_chat_pictures(tmp_path)
    (alone,), many = draw(reader, shape.side, 1, 3), draw(reader, shape.side, 16, 3)
    assert alone.tokens not in [prompt.tokens for prompt in many]
    assert alone.placed.span.digest not in [prompt.placed.span.digest for prompt in many]
    assert [prompt.tokens for prompt in many] == [prompt.tokens for prompt in draw(reader, shape.side, 16, 3)]
