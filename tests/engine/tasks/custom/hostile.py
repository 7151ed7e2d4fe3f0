"""Calls every operator that a program may call with hostile arguments. `test_operators` runs it in a child process.

Arguments are an ordinary call from CALLS with one or two arguments replaced, or random values of the declared types. An
operator may raise an error, but it must not end its process. A call that takes long is cut off; it is no error.
Usage: python -m tests.engine.tasks.custom.hostile SEED CALLS BYTES [OPERATOR...]
"""

import contextlib
import os
import random
import resource
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, TextIO

import torch

from conveyor_engine.tasks.custom.execution.graph import _find_operator
from conveyor_engine.tasks.custom.execution.operators import ALLOWED, CHECKED

SECONDS: Final = 5  # for all calls of an operator
INTEGERS: Final = (0, 1, 2, 3, 5, -1, -2, -7, 2**31 - 1, 2**31, -(2**31), 2**40, -(2**40), 2**62, -(2**63), 2**63 - 1)
X: Final = torch.arange(24.0).reshape(2, 3, 4)
IMAGE: Final = torch.arange(96.0).reshape(1, 4, 4, 6)
ROWS: Final = torch.tensor([[[0, 1, 2, 0]], [[1, 0, 2, 1]]])
ROW: Final = torch.tensor([0, 2, 1])
ONES: Final = [torch.ones(size) for size in ((12, 4), (12, 4), (12,), (12,))]
GATES: Final = [torch.ones(size) for size in ((16, 4), (16, 4), (16,), (16,))]
PLAIN: Final = [torch.ones(size) for size in ((4, 4), (4, 4), (4,), (4,))]
STATE: Final = torch.zeros(1, 2, 4)
CALLS: Final[dict[str, list[Any]]] = {
    "index.Tensor": [X, [ROW[:2, None] % 2, None, ROW]], "index_put.default": [X, [ROW[:2] % 2], X[0], True],
    "index_select.default": [X, 1, ROW], "index_add.default": [X, 1, ROW, X], "index_copy.default": [X, 1, ROW, X],
    "index_fill.int_Scalar": [X, 1, ROW, 7], "index_reduce.default": [X, 1, ROW, X, "mean"],
    "gather.default": [X, 1, ROWS], "scatter.src": [X, 1, ROWS, X], "scatter.value": [X, 1, ROWS, 7],
    "scatter_add.default": [X, 1, ROWS, X], "scatter_reduce.two": [X, 1, ROWS, X, "amax"], "take.default": [X, ROW],
    "take_along_dim.default": [X, ROWS, 1], "masked_scatter.default": [X, X > 3, X], "one_hot.default": [ROW, 3],
    "embedding.default": [X[0], ROWS], "searchsorted.Tensor": [X, X], "bucketize.Tensor": [X, ROW],
    "bincount.default": [ROW, None, 3], "repeat_interleave.Tensor": [ROW],
    "repeat_interleave.self_Tensor": [X, ROW, 1], "slice_scatter.default": [X, X[:, 1:], 1, 1, 3, 1],
    "select_scatter.default": [X, X[:, 1], 1, 1], "diagonal_scatter.default": [X, torch.ones(4, 2), 0, 0, 1],
    "constant_pad_nd.default": [X, [1, 1]], "pad.default": [X, [1, 1], "reflect"], "unfold.default": [X, 1, 2, 1],
    "unfold_copy.default": [X, 1, 2, 1], "im2col.default": [IMAGE, [2, 2], [1, 1], [0, 0], [1, 1]],
    "col2im.default": [torch.ones(1, 4, 15), [4, 6], [2, 2], [1, 1], [0, 0], [1, 1]],
    "pixel_shuffle.default": [IMAGE, 2], "pixel_unshuffle.default": [IMAGE, 2], "channel_shuffle.default": [IMAGE, 2],
    "reflection_pad1d.default": [X, [1, 1]], "replication_pad1d.default": [X, [1, 1]],
    "reflection_pad2d.default": [IMAGE, [1, 1, 1, 1]], "replication_pad2d.default": [IMAGE, [1, 1, 1, 1]],
    "reflection_pad3d.default": [IMAGE[None], [1, 1, 1, 1, 1, 1]],
    "replication_pad3d.default": [IMAGE[None], [1, 1, 1, 1, 1, 1]],
    "upsample_nearest1d.default": [X, [8], None], "upsample_nearest1d.vec": [X, [8], None],
    "upsample_linear1d.default": [X, [8], False, None], "upsample_nearest2d.default": [IMAGE, [8, 9], None, None],
    "upsample_nearest2d.vec": [IMAGE, None, [2.0, 2.0]], "upsample_bilinear2d.vec": [IMAGE, [8, 9], False, None],
    "upsample_bilinear2d.default": [IMAGE, [8, 9], False, None, None],
    "upsample_bicubic2d.default": [IMAGE, [8, 9], False, None, None],
    "_upsample_nearest_exact2d.default": [IMAGE, [3, 9], None, None],
    "upsample_trilinear3d.default": [IMAGE[None], [3, 9, 9], False, None, None, None],
    "upsample_nearest3d.default": [IMAGE[None], [3, 9, 9], None, None, None],
    "grid_sampler_2d.default": [IMAGE, torch.ones(1, 3, 3, 2), 0, 0, False],
    "grid_sampler_3d.default": [IMAGE[None], torch.ones(1, 2, 3, 3, 3), 0, 0, False],
    "max_pool2d_with_indices.default": [IMAGE, [2, 2], [1, 1], [1, 1], [1, 1], False],
    "max_pool3d_with_indices.default": [IMAGE[None], [2, 2, 2], [1, 1, 1], [0, 0, 0], [1, 1, 1], False],
    "avg_pool2d.default": [IMAGE, [2, 2], [1, 1], [1, 1], False, True, None],
    "avg_pool3d.default": [IMAGE[None], [2, 2, 2], [1, 1, 1], [0, 0, 0], False, True, None],
    "avg_pool1d.default": [X, [2], [1], [1]], "max_pool1d.default": [X, [2], [1], [1], [1], False],
    "_adaptive_avg_pool2d.default": [IMAGE, [2, 2]], "_adaptive_avg_pool3d.default": [IMAGE[None], [2, 2, 2]],
    "adaptive_max_pool2d.default": [IMAGE, [2, 2]], "adaptive_max_pool3d.default": [IMAGE[None], [2, 2, 2]],
    "convolution.default": [IMAGE, torch.ones(2, 4, 2, 2), torch.ones(2), [1, 1], [0, 0], [1, 1], False, [0, 0], 1],
    "conv2d.default": [IMAGE, torch.ones(2, 4, 2, 2), torch.ones(2), [1, 1], [0, 0], [1, 1], 1],
    "conv_transpose2d.input": [IMAGE, torch.ones(4, 2, 2, 2), torch.ones(2), [1, 1], [0, 0], [0, 0], 1, [1, 1]],
    "_native_batch_norm_legit_no_training.default": [IMAGE, *[torch.ones(4)] * 4, 0.1, 1e-5],
    "batch_norm.default": [IMAGE, *[torch.ones(4)] * 4, False, 0.1, 1e-5, True],
    "instance_norm.default": [IMAGE, *[torch.ones(4)] * 4, True, 0.1, 1e-5, True],
    "native_layer_norm.default": [X, [4], torch.ones(4), torch.ones(4), 1e-5],
    "layer_norm.default": [X, [4], torch.ones(4), torch.ones(4), 1e-5], "rms_norm.default": [X, [4], torch.ones(4)],
    "group_norm.default": [IMAGE, 2, torch.ones(4), torch.ones(4), 1e-5],
    "scaled_dot_product_attention.default": [IMAGE, IMAGE, IMAGE, torch.ones(1, 4, 4, 4)],
    "gru.input": [X, STATE, ONES, True, 1, 0.0, False, False, True],
    "rnn_tanh.input": [X, STATE, PLAIN, True, 1, 0.0, False, False, True],
    "lstm.input": [X, [STATE, STATE], GATES, True, 1, 0.0, False, False, True],
    "gru_cell.default": [X[0], X[0], *ONES], "lstm_cell.default": [X[0], [X[0], X[0]], *GATES],
    "stft.default": [torch.ones(64), 16, 4, 16, torch.ones(16), False, True, True],
    "fft_irfft.default": [X.to(torch.complex64), 8, 1, "forward"], "fft_rfft.default": [X, 8, 1, "ortho"],
    "topk.default": [X, 2, 1], "kthvalue.default": [X, 2, 1], "sort.default": [X, 1], "narrow.default": [X, 1, 1, 2],
    "slice.Tensor": [X, 1, 1, 3, 1], "select.int": [X, 1, 2],
    "view.default": [X, [6, 4]], "expand.default": [X, [2, 3, 4]],
    "repeat.default": [X, [1, 2, 1]], "split_with_sizes.default": [X, [1, 2], 1], "roll.default": [X, [1], [1]],
    "tril_indices.default": [3, 4, 0],
    "triu_indices.default": [3, 4, 0], "tril.default": [X, 1], "triu.default": [X, 1],
    "diagonal.default": [X, 1, 0, 1], "diag_embed.default": [X, 1, 0, 1], "cdist.default": [X, X, 2.0],
    "multinomial.default": [X[0] + 1, 2, True], "randperm.default": [5], "eye.m": [3, 4], "full.default": [[2, 3], 1],
    "arange.start_step": [0, 6, 2], "linspace.default": [0, 1, 5], "vander.default": [X[0, 0], 3],
    "tensor_split.tensor_indices_or_sections": [X, ROW[:2].sort()[0], 1], "unflatten.int": [X, 2, [2, 2]],
    "cumsum.default": [X, 1], "glu.default": [X, 2], "unique_dim.default": [X, 1],
    "addmm.default": [X[0, :, :3], X[0, :, :3], X[0, :, :3]],
}  # fmt: skip


def main(seed: int, calls: int, memory: int, chosen: list[str]) -> None:
    """Call each operator in a process of its own, and print those that ended by a signal."""
    torch.set_num_threads(1)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + memory, used + memory))
    for name, overload in find_overloads():
        if chosen and name not in chosen:
            continue
        with tempfile.TemporaryFile("w+") as log:
            if (process := os.fork()) == 0:
                signal.alarm(SECONDS)
                call(overload, name, random.Random(f"{seed} {name}"), calls, log)
                os._exit(0)
            end = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
            if end not in (0, -signal.SIGALRM):
                log.seek(0)
                print("ended with", end, log.read().splitlines()[-1:])
    print("end")


def find_overloads() -> Iterator[tuple[str, torch._ops.OpOverload]]:
    """Yield all overloads of the installed torch that a program may call."""
    for base in sorted({name.partition(".")[0] for name in ALLOWED}):
        packet = getattr(torch.ops.aten, base, None)
        for overload in packet.overloads() if packet is not None else []:
            with contextlib.suppress(Exception):
                found = _find_operator(f"torch.ops.aten.{base}.{overload}")
                assert isinstance(found, torch._ops.OpOverload)
                yield f"{base}.{overload}", found


def call(overload: torch._ops.OpOverload, name: str, chance: random.Random, calls: int, log: TextIO) -> None:
    run = CHECKED.get(name, overload)
    with torch.inference_mode():
        if name in CALLS:
            run(*CALLS[name])
        for _ in range(calls * 4 if name in CALLS else calls):
            args, kwargs = make_arguments(overload, name, chance)
            print(name, show(args), show(kwargs), file=log, flush=True)
            with contextlib.suppress(Exception):
                run(*args, **kwargs)


def show(value: Any) -> Any:
    """Return the value with small tensors of integers as their values, and other tensors as their types and shapes."""
    if isinstance(value, torch.Tensor):
        whole = value.dtype == torch.int64 and value.numel() < 9
        return f"{str(value.dtype)[6:]}{value.tolist() if whole else list(value.shape)}"
    if isinstance(value, dict):
        return {name: show(each) for name, each in value.items()}
    return [show(each) for each in value] if isinstance(value, list) else value


def make_arguments(
    overload: torch._ops.OpOverload, name: str, chance: random.Random
) -> tuple[list[Any], dict[str, Any]]:
    declared = overload._schema.arguments
    if name in CALLS:
        args = list(CALLS[name])
        for at in chance.sample(range(len(args)), min(len(args), chance.choice((1, 1, 2)))):
            args[at] = spoil(args[at], str(declared[at].real_type), chance)
        return args, {}
    args, kwargs = [], {}
    for arg in declared:
        if arg.has_default_value() and chance.random() < 0.5:
            if not arg.kwarg_only:
                args.append(arg.default_value)
            continue
        value = make(str(arg.real_type), chance)
        if arg.kwarg_only:
            kwargs[arg.name] = value
        else:
            args.append(value)
    return args, kwargs


def spoil(value: Any, kind: str, chance: random.Random) -> Any:
    """Return the value with one element changed, or another value of its type."""
    if isinstance(value, list) and value and chance.random() < 0.6:
        at = chance.randrange(len(value))
        return [
            *value[:at],
            spoil(value[at], "Tensor" if isinstance(value[at], torch.Tensor) else "int", chance),
            *value[at + 1 :],
        ]
    if (
        isinstance(value, torch.Tensor)
        and not value.is_floating_point()
        and value.dtype != torch.bool
        and chance.random() < 0.6
    ):
        value = value.clone()
        value.view(-1)[chance.randrange(value.numel())] = chance.choice(INTEGERS)
        return value
    if isinstance(value, torch.Tensor) and value.dim() and chance.random() < 0.6:
        dim = chance.randrange(value.dim())
        return chance.choice(
            (value.narrow(dim, 0, 1), value.narrow(dim, 0, 0), value.repeat_interleave(3, dim), value.sum(dim))
        )
    return make(kind, chance)


def make(kind: str, chance: random.Random) -> Any:
    """Return a random value of a declared type."""
    if kind.startswith("Optional["):
        return None if chance.random() < 0.4 else make(kind[len("Optional[") : -1], chance)
    if kind.startswith("List["):
        return [make(kind[len("List[") : -1], chance) for _ in range(chance.randrange(5))]
    match kind:
        case "Tensor":
            return make_tensor(chance)
        case "int":
            return chance.choice(INTEGERS[: 6 if chance.random() < 0.6 else None])
        case "float" | "number":
            return chance.choice((0.0, 1.0, -1.0, 0.5, 2, -3, 1e30, -1e30, float("inf"), float("nan")))
        case "bool":
            return chance.random() < 0.5
        case "ScalarType":
            return chance.choice((torch.float32, torch.int64, torch.bool, torch.float16, torch.complex64, torch.uint8))
        case "MemoryFormat":
            return chance.choice((torch.contiguous_format, torch.channels_last, torch.channels_last_3d))
        case "str":
            return chance.choice(
                ("mean", "sum", "prod", "none", "reflect", "circular", "same", "valid", "ij", "left", "i,i->i", "x")
            )
    return None


def make_tensor(chance: random.Random) -> torch.Tensor:
    shape = [chance.choice((0, 1, 2, 2, 3, 3, 4)) for _ in range(chance.randrange(6))]
    match chance.randrange(6):
        case 0:
            return torch.tensor([chance.choice(INTEGERS) for _ in range(4)])[: chance.randrange(5)]
        case 1:
            return torch.ones(shape, dtype=torch.int64)
        case 2:
            return torch.ones(shape, dtype=torch.bool)
        case 3:
            return torch.full(shape, chance.choice((float("nan"), float("inf"), -1e30, 1e30)))
        case 4:
            return torch.ones(shape, dtype=chance.choice((torch.float16, torch.float64, torch.uint8, torch.complex64)))
    return torch.ones(shape).transpose(0, -1) if len(shape) > 1 else torch.ones(shape)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), sys.argv[4:])
