"""Peers in processes of their own: a small script that speaks the protocol, started as the bench starts its peers."""

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from conveyor_bench.comparing.systems import Prompts
from conveyor_bench.peers.process import PeerProcess
from conveyor_bench.workloads import seeing
from conveyor_bench.workloads.seeing import SHAPES, TOKENS, Vllm, draw, write_model
from conveyor_engine.tasks.generate.chat_pictures import load_chat_pictures
from e2e.cluster.paths import CACHE

# In each step one more request begins. A request's first token is the number of its prompt's tokens, and its second
# the width of its image.
PEER = """
# /// script
# dependencies = []
# ///
import json
import struct
import sys

def run(prompts, output_tokens, images=()):
    files = [open(image, "rb").read(26) for image in images]
    rows = [[] for _ in prompts]
    yield 0
    while len(rows[-1]) < output_tokens:
        for number, row in enumerate(rows):
            if len(row) < output_tokens and (not number or rows[number - 1]):
                width = struct.unpack_from("<i", files[number], 18)[0] if files else 0
                row.append([len(prompts[number]), width][len(row)] if len(row) < 2 else len(row))
                if len(row) == 1:
                    break
        yield [len(row) for row in rows]
    yield rows

for line in sys.stdin:
    question = json.loads(line)
    if question == {}:
        break
    current = run(**question) if question else current
    print(json.dumps(next(current)), flush=True)
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (uv,) = CACHE.glob("uv-*/bin/uv")
    monkeypatch.setenv("UV", str(uv))
    for name in ("CONVEYOR_CACHE", "UV_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    (tmp_path / "peer.py").write_text(PEER)
    return str(tmp_path / "peer.py")


def drain(steps: Generator[list[int], None, Prompts]) -> tuple[list[list[int]], Prompts]:
    """Return the counts of each step, and the run's outputs."""
    outputs: Prompts = []

    def run() -> Iterator[list[int]]:
        outputs.extend((yield from steps))

    return list(run()), outputs


def test_a_peer_s_run_has_the_counts_of_each_step_and_ends_with_all_tokens(tmp_path: Path, script: str) -> None:
    peer = PeerProcess(script, tmp_path, "float32")
    steps = peer.begin(prompts=[[5, 6, 7], [8]], output_tokens=2)
    assert drain(steps) == ([[1, 0], [2, 1], [2, 2]], [[3, 0], [1, 0]])
    assert drain(peer.begin(prompts=[[9]], output_tokens=2)) == ([[1], [2]], [[1, 0]])


def test_a_peer_that_ends_is_an_error(tmp_path: Path, script: str) -> None:
    peer = PeerProcess(script, tmp_path, "float32")
    with pytest.raises(RuntimeError, match="the peer's process ended"):
        peer.begin()


def test_a_peer_s_pictures_are_files_and_one_token_each(
    tmp_path: Path, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seeing, "PeerProcess", lambda _, *model: PeerProcess(script, *model))
    shape = SHAPES["tiny"]
    write_model(tmp_path, shape)
    prompts = draw(load_chat_pictures(tmp_path), shape.side, 3, seed=1)
    done = Vllm(tmp_path, "float32").run(prompts)
    num_tokens = [len(prompt.tokens) - prompt.placed.picture.num_places + 1 for prompt in prompts]
    assert done.tokens == [[number, shape.side, *range(2, TOKENS)] for number in num_tokens]
    assert 0 < done.first < done.seconds
