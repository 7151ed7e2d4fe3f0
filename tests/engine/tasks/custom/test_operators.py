"""Tests which operators a program may call, and that no arguments of theirs end the process."""

import re
import subprocess
import sys

import pytest
import torch
from tests.engine.tasks.custom.hostile import find_overloads

from conveyor_engine.errors import ModelError
from conveyor_engine.tasks.custom.execution.graph import _find_operator
from conveyor_engine.tasks.custom.execution.operators import ALLOWED, IN_PLACE

UNDERSCORED = {
    "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "_local_scalar_dense", "_log_softmax",
    "_native_batch_norm_legit_no_training", "_safe_softmax", "_softmax", "_to_copy", "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d", "_upsample_nearest_exact3d",
    "__and__", "__lshift__", "__or__", "__rshift__", "__xor__",
}  # fmt: skip
DANGEROUS = re.compile(
    r"unsafe|sparse|coo|csr|csc|bsr|bsc|nested|jagged|quant|qparams|empty|strided|resize|^set|storage|stride|"
    r"backward|cudnn|miopen|mkldnn|mps|fbgemm|int4|int8|foreach|fused|^_test|file"
)
SKIPPED = {"_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range"}
SKIPPED |= {"sym_constrain_range_for_size"}


def list_overloads() -> set[str]:
    """Return all overloads of ATen in the installed torch, and those that TorchScript has in addition."""
    registered = [name[6:] for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    names = {name if "." in name else f"{name}.default" for name in registered}
    for base in {name.partition(".")[0] for name in names} | {name.partition(".")[0] for name in ALLOWED}:
        packet = getattr(torch.ops.aten, base, None)
        names |= {f"{base}.{overload}" for overload in (packet.overloads() if packet is not None else [])}
    return names


def test_an_operator_is_listed_or_refused() -> None:
    accepted = {name for name, _ in find_overloads()}
    assert 600 < len(accepted) < 1000
    for name in list_overloads():
        base = name.partition(".")[0]
        if name in accepted:
            assert {name, base} & ALLOWED
        elif base in SKIPPED:
            assert _find_operator(f"torch.ops.aten.{name}") is None
        else:
            words = rf"calls 'torch.ops.aten.{re.escape(name)}'.*run_decompositions\(\{{\}}\).*engine.modelClass"
            with pytest.raises(ModelError, match=words):
                _find_operator(f"torch.ops.aten.{name}")


def test_no_listed_operator_changes_its_arguments_or_leaves_its_tensors() -> None:
    assert {name for name in ALLOWED if name.startswith("_")} == UNDERSCORED
    assert [name for name in ALLOWED if DANGEROUS.search(name)] == []
    for name, overload in find_overloads():
        schema = overload._schema
        written = [at for at, arg in enumerate(schema.arguments) if arg.alias_info and arg.alias_info.is_write]
        assert written == ([0] if name.partition(".")[0] in IN_PLACE else []), name
        assert overload._overloadname != "out"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_arguments_end_the_process() -> None:
    command = [sys.executable, "-m", "tests.engine.tasks.custom.hostile", "1", "12", str(1 << 29)]
    output = subprocess.run(command, capture_output=True, text=True, check=False)
    assert output.stdout == "end\n", output.stdout[-2000:] + output.stderr[-2000:]
    assert output.returncode == 0
