"""Enables Triton's interpreter if there is no GPU. Must be imported before triton and the kernels.

The interpreter computes bfloat16 wrongly, so that type is tested only on a GPU.
"""

import os
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

HAVE_GPU = torch.cuda.is_available()
if not HAVE_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton and the kernels are first imported

ON_DEVICE = [pytest.mark.gpu] if HAVE_GPU else []  # for tests that also run without a GPU, in the interpreter
DEVICE = torch.device("cuda" if HAVE_GPU else "cpu")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 3e-2}
FOR_BFLOAT16 = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAVE_GPU, reason="needs a GPU: Triton's interpreter computes bfloat16 wrongly"),
]
DTYPES = pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        pytest.param(torch.float16, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, marks=FOR_BFLOAT16),
    ],
    ids=["float32", "float16", "bfloat16"],
)


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape).to(dtype).to(DEVICE)


def assert_close(actual: torch.Tensor, exact: torch.Tensor) -> None:
    assert actual.shape == exact.shape
    error = (actual.double() - exact).abs().max() / exact.abs().max()
    assert error < TOLERANCE[actual.dtype], f"differ by {error:.1e}"


def in_types(names: str, *cases: tuple[object, ...]) -> pytest.MarkDecorator:
    """Parametrize `dtype` and these names: every case in float32, and in bfloat16 on a GPU.

    CI runs the first case and the last one in float32. The others show in one more way what these show.
    """

    def marks(dtype: torch.dtype, case: tuple[object, ...]) -> Any:
        if dtype == torch.bfloat16:
            return FOR_BFLOAT16
        if dtype == torch.float32:
            return () if case in (cases[0], cases[-1]) else pytest.mark.slow
        return pytest.mark.slow if case is cases[-1] else pytest.mark.nightly

    return pytest.mark.parametrize(
        f"dtype, {names}",
        [
            pytest.param(
                dtype,
                *case,
                marks=marks(dtype, case),
                id="-".join(map(str, (*case, str(dtype)[6:]))),
            )
            for dtype in TOLERANCE
            for case in cases
        ],
    )


def sum_in_disorder(weights: npt.NDArray[np.float32], axis: int) -> npt.NDArray[np.float32]:
    """Return the cumulated weights, each with its own error, like a GPU's parallel sum but with larger errors."""
    ends: npt.NDArray[np.float32] = weights.cumsum(axis)
    errors = np.random.default_rng(0).uniform(-0.02, 0.02, ends.shape)
    return (ends * (1 + errors)).astype(np.float32)
