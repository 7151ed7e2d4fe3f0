"""Checks that steps over static buffers give the same tokens as packed steps, and that their padding changes nothing.

There is no graph here: the same work runs again. `test_replay` replays it.
"""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.engine.loop.test_plain_steps import MODES, request_everything
from tests.engine.references import Reference, add, answers, run, tokens_of
from tests.engine.tiny_models import VOCAB_SIZE, save_tiny_model

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.execution import native
from conveyor_engine.execution.graphs import cuda
from conveyor_engine.execution.graphs.cuda import Work, choose_capture, run_again
from conveyor_engine.execution.graphs.decodes import batch_sizes, is_decode_only
from conveyor_engine.execution.graphs.mixed import token_sizes
from conveyor_engine.execution.graphs.step_graphs import StepGraphs
from conveyor_engine.execution.placement import open_placement
from conveyor_engine.execution.sampling.processor import Samples
from conveyor_engine.execution.sampling.sampler import Found
from conveyor_engine.loop.core import EngineCore
from conveyor_engine.tasks.generate.execution.runner import GenerateRunner
from conveyor_engine.wire.request import RequestOutput
from conveyor_engine.wire.step import StepPlan
from conveyor_protocol.workload import Lengths

GetReference = Callable[[str], Reference]
pytestmark = pytest.mark.skipif(
    native.why_missing() is not None, reason=f"needs the compiled kernels: {native.why_missing()}"
)


def make_core(ref: Reference, **changes: Any) -> EngineCore:
    return ref.make_core(**({"capture": run_again, "attention_backend": "native"} | changes))


def graphs_of(core: EngineCore) -> StepGraphs:
    assert isinstance(core.executor, GenerateRunner)
    assert core.executor.graphs is not None
    return core.executor.graphs


class Seen:
    """Records the steps that run in this way: the rows of decodes, and the tokens of other steps."""

    def __init__(self, core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.decodes: list[int] = []
        self.mixed: list[int] = []
        graphs = graphs_of(core)
        replay = graphs.run

        def run_and_note(plan: StepPlan) -> tuple[torch.Tensor, Samples, Found | None] | None:
            done = replay(plan)
            if done is not None and is_decode_only(plan):
                self.decodes.append(len(plan.rows))
            elif done is not None:
                self.mixed.append(sum(plan.num_tokens))
            return done

        monkeypatch.setattr(graphs, "run", run_and_note)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "gpt2", "qwen3_5_text"])
def test_the_answers_are_those_of_generate(reference: GetReference, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    ref = reference(kind)
    core = make_core(ref, max_num_batched_tokens=200)
    seen = Seen(core, monkeypatch)
    assert answers(core, ref.prompts[:3]) == ref.answers[:3]
    assert 3 in seen.decodes, "which is padded to 4"
    assert sum(seen.mixed) >= sum(map(len, ref.prompts[:3])), "all prompts"
    assert set(seen.mixed) - set(token_sizes(200)), "some are padded"


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "ahead"])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: "-".join(mode.values()))
@pytest.mark.parametrize("num_kv_blocks", [pytest.param(64, marks=pytest.mark.slow), 8])
def test_every_mode_and_parameter_gives_the_tokens_of_packed_steps(
    reference: GetReference, mode: dict[str, Any], num_kv_blocks: int, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = reference("llama")
    results = []
    for capture in (run_again, None):
        changes = {"num_kv_blocks": num_kv_blocks, "max_num_batched_tokens": 200, "overlap": overlap, **mode}
        core = make_core(ref, capture=capture, **changes)
        seen = Seen(core, monkeypatch) if capture else None
        core.scheduler._outputs.expected_output_tokens = 1.0
        request_everything(core, ref.prompts)
        results.append(comparable(run(core)))
        assert seen is None or (seen.decodes and seen.mixed)
    assert results[0] == results[1]


def comparable(outputs: dict[str, list[RequestOutput]]) -> dict[str, Any]:
    """Return tokens, finish reasons, and the tokens of log probabilities. Products of other sizes round differently."""
    return {
        name: (
            tokens_of(one),
            one[-1].finish_reason,
            [[entry.top_token_ids for entry in output.logprobs or []] for output in one],
        )
        for name, one in outputs.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_5_text"])
@pytest.mark.parametrize("seed", range(2))
def test_requests_that_come_and_go_at_random_get_the_same_tokens(
    reference: GetReference, kind: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = reference(kind)
    results = []
    for capture in (run_again, None):
        core = make_core(ref, capture=capture, num_kv_blocks=8, max_num_seqs=6, max_num_batched_tokens=64)
        seen = Seen(core, monkeypatch) if capture else None
        results.append(run_at_random(core, Random(seed)))
        assert seen is None or (len(set(seen.decodes)) > 2 and len(set(seen.mixed)) > 9)
        assert core.stats().num_preemptions > 0
    assert results[0] == results[1]


def run_at_random(core: EngineCore, random: Random) -> dict[str, list[int]]:
    """Run twenty requests, some with the same beginning and some aborted. Only the random numbers decide the plans."""
    shared = [random.randrange(1, VOCAB_SIZE) for _ in range(40)]
    results: dict[str, list[int]] = {}
    waiting = [str(number) for number in range(20)]
    while waiting or core.has_unfinished():
        if waiting and random.random() < 0.3:
            own = [random.randrange(1, VOCAB_SIZE) for _ in range(random.randrange(1, 30))]
            params = random.choice([{}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.0}, {"min_tokens": 4}])
            prompt = shared[: random.choice([0, 16, 40])] + own
            add(core, waiting.pop(), prompt, max_tokens=random.randrange(1, 25), seed=random.randrange(99), **params)
        if results and random.random() < 0.02:
            core.abort(random.choice(sorted(results)))
        for output in core.step(0.0):
            results.setdefault(output.request_id, []).extend(output.new_token_ids)
    return results


def test_padding_changes_nothing(reference: GetReference, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the spare row's token is, no logit of another row changes, and no key or value outside its block."""
    ref = reference("llama")
    core = make_core(ref, max_num_batched_tokens=200)
    graphs, caches = graphs_of(core), [c for pair in core.executor.backend._caches for c in pair]  # type: ignore[attr-defined]
    replay, padded = graphs.run, []

    def run_with(token: int, plan: StepPlan) -> list[torch.Tensor]:
        graphs._rows.token_ids[4, 0] = token  # the padding's token
        logits, *_ = replay(plan) or pytest.fail("no graph")
        return [logits.clone(), *(cache[:64].clone() for cache in caches)]

    def run_twice(plan: StepPlan) -> tuple[torch.Tensor, Samples] | None:
        pairs = list(zip(run_with(5, plan), run_with(77, plan), strict=True))
        assert all(torch.equal(first, second) for first, second in pairs)
        padded.append((is_decode_only(plan), len(plan.rows) == 3 or sum(plan.num_tokens) % 16 > 0))
        return replay(plan)

    monkeypatch.setattr(graphs, "run", run_twice)
    assert answers(core, ref.prompts[:3]) == ref.answers[:3]
    assert {(True, True), (False, True)} <= set(padded)
    assert all(cache[64].any() for cache in caches), "its own block is the one behind those of requests"


def test_a_prompt_whose_tokens_are_scored_has_no_graph(
    reference: GetReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a step has more logits than rows."""
    results = []
    for capture in (run_again, None):
        core = make_core(reference("llama"), capture=capture, max_num_batched_tokens=200)
        seen = Seen(core, monkeypatch) if capture else None
        add(core, "scored", [*range(1, 50)], max_tokens=3, prompt_logprobs=1)
        results.append(comparable(run(core)))
        assert seen is None or (seen.mixed == [] and seen.decodes)
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("fits", "mixed", "decodes"), [(0, [], []), (1, [200], [4]), (30, token_sizes(200), [1, 2, 4])]
)
def test_a_capture_that_fails_leaves_smaller_steps_to_the_host_and_says_so_once(
    reference: GetReference, fits: int, mixed: list[int], decodes: list[int]
) -> None:
    ref = reference("llama")
    captured: list[Work] = []
    lines: list[str] = []

    def fail_at_times(work: Work) -> Work:
        captured.append(work)
        if len(captured) in (fits + 1, 2 * fits + 2):
            raise RuntimeError("operation not permitted when stream is capturing")
        return work

    config = ref.make_config(attention_backend="native", max_num_batched_tokens=200)
    core = EngineCore(config, GenerateRunner(config, open_placement(config), lines.append, capture=fail_at_times))
    assert graphs_of(core).sizes("mixed") == mixed
    assert graphs_of(core).sizes("decodes") == decodes
    failed = [line.split()[1] for line in lines if "event=cuda_graph_failed" in line]
    assert failed == ([] if fits == 30 else ["steps=mixed", "steps=decodes"])
    assert answers(core, ref.prompts) == ref.answers


@pytest.mark.slow
def test_no_graph_is_larger_than_the_batch_of_short_requests_that_the_cache_holds(reference: GetReference) -> None:
    lengths = {"workload_input_tokens": Lengths(20, 40), "workload_output_tokens": Lengths(12, 20)}
    short = make_core(reference("llama"), max_num_seqs=8, num_kv_blocks=12, **lengths)
    assert graphs_of(short).sizes("decodes") == [1, 2, 4, 6]
    assert answers(short, reference("llama").prompts) == reference("llama").answers
    one_token = make_core(reference("llama"), **lengths | {"workload_output_tokens": Lengths(1, 1)})
    assert graphs_of(one_token).sizes("decodes") == []
    assert graphs_of(one_token).sizes("mixed")


def test_sizes_are_few_and_the_last_is_the_largest_batch() -> None:
    assert batch_sizes(1) == [1]
    assert batch_sizes(5) == [1, 2, 4, 5]
    assert batch_sizes(32) == [1, 2, 4, 8, 16, 32]
    assert batch_sizes(256)[-3:] == [224, 240, 256]
    assert len(batch_sizes(1024)) == 32
    assert batch_sizes(300)[-2:] == [256, 300]


def test_sizes_in_tokens_leave_an_eighth_to_padding_from_128_on() -> None:
    sizes = token_sizes(100_000)
    assert sizes[:8] == [16, 32, 48, 64, 80, 96, 112, 128]
    assert sizes[-3:] == [1792, 1920, 2048]
    assert all(larger - smaller <= smaller / 8 for smaller, larger in pairwise(sizes[7:]))
    assert token_sizes(13) == [13]
    assert token_sizes(200) == [16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 200]


@pytest.mark.parametrize(
    ("num_tokens", "num_logits", "num_decodes", "is_one"),
    [([1, 1], [1, 1], 2, True), ([1, 5], [1, 1], 1, False), ([1, 1], [1, 0], 2, False), ([], [], 0, False)],
)
def test_a_step_is_one_of_decodes_if_each_row_computes_and_samples_a_token(
    num_tokens: list[int], num_logits: list[int], num_decodes: int, is_one: bool
) -> None:
    plan = StepPlan(0, [], [], [*range(len(num_tokens))], [3] * len(num_tokens), num_tokens, num_logits, num_decodes)
    assert is_decode_only(plan) == is_one


def test_graphs_are_for_gpus_unless_they_are_unwanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "CudaCapture", lambda device: device)
    assert choose_capture(torch.device("cuda"), enforce_eager=False) == torch.device("cuda")
    assert choose_capture(torch.device("cuda"), enforce_eager=True) is None
    assert choose_capture(torch.device("cpu"), enforce_eager=False) is None


def test_attention_that_needs_lengths_on_the_host_has_no_graphs(reference: GetReference) -> None:
    core = reference("llama").make_core(capture=run_again, attention_backend="torch")
    assert isinstance(core.executor, GenerateRunner)
    assert core.executor.graphs is None


class _Plain:
    """A kind of steps without a model."""

    name, sizes, size = "plain", (16, 512, 2048), 0

    def size_of(self, plan: StepPlan) -> int | None:
        return None

    def fill(self, plan: StepPlan | None, size: int) -> Any:
        self.size = size

    def compute(self, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return torch.zeros(1, 8), torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)


@pytest.mark.parametrize(
    ("error", "captured"),
    [(torch.OutOfMemoryError("CUDA out of memory"), [16, 512]), (RuntimeError("the model reads a value"), [])],
)
def test_sizes_below_one_without_memory_are_captured(error: Exception, captured: list[int]) -> None:
    kind, messages = _Plain(), list[str]()

    def capture(work: Work) -> Work:
        if kind.size == 2048:
            raise error
        work()
        return work

    graphs = StepGraphs([kind], SimpleNamespace(block_tables=torch.zeros(5, 4)))  # type: ignore[arg-type]
    graphs.capture(capture, messages.append)
    assert graphs.sizes("plain") == captured
    assert graphs.num_lost == 3 - len(captured)
    assert "event=cuda_graph_failed steps=plain size=2048" in messages[0]


def test_the_log_says_why_a_model_has_no_graphs(tmp_path: Path) -> None:
    """Recurrences of heads whose size is no multiple of 16 run transformers' code."""
    save_tiny_model("olmo_hybrid", tmp_path, linear_key_head_dim=24)
    config = EngineConfig(
        model=str(tmp_path), device="cpu", dtype="float32", max_model_len=64, max_num_seqs=2, num_kv_blocks=8,
        attention_backend="native", warmup=False,
    )  # fmt: skip
    lines: list[str] = []
    runner = GenerateRunner(config, open_placement(config), lines.append, capture=run_again)
    assert runner.graphs is None
    assert "event=graphs_left_out attention_allows=True ranks=1 states_by_transformers=True" in lines
