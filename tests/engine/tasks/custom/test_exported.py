"""Tests programs of torch.export: their inputs are derived correctly, and they compute the same as torch."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.tasks.custom.programs import LENGTH_MAX, WRITERS, edit, make_inputs, rewrite
from torch.export import Dim, export, save

from conveyor_engine.errors import ModelError
from conveyor_engine.tasks.custom.execution.exported import ExportedProgram
from conveyor_engine.wire.tensors import Signature, TensorSpec

CPU = torch.device("cpu")
SIGNATURES = {
    "dense": Signature(
        (TensorSpec("features", "FP32", (4,)), TensorSpec("kind", "INT64", ())),
        (TensorSpec("scores", "FP32", (3,)), TensorSpec("best", "INT64", ())),
    ),
    "encoder": Signature(
        (TensorSpec("ids", "INT64", ("length",)),),
        (TensorSpec("logits", "FP32", (3,)), TensorSpec("hidden", "FP32", ("length", 8))),
        {"length": (1, LENGTH_MAX)},
    ),
    "bag": Signature(
        (TensorSpec("ids", "INT64", ("length",)),),
        (TensorSpec("vector", "FP32", (4,)), TensorSpec("numbers", "FP32", ("length",))),
        {"length": (1, LENGTH_MAX)},
    ),
    "conv": Signature(
        (TensorSpec("pixels", "UINT8", (1, "length_0", "length_1")),),
        (TensorSpec("output", "FP32", (2,)),),
        {"length_0": (1, 8), "length_1": (1, 8)},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", WRITERS)
def test_it_computes_what_the_module_computes(
    kind: str, written: Callable[[str], tuple[Path, torch.nn.Module]]
) -> None:
    folder, module = written(kind)
    program = ExportedProgram(folder, CPU, LENGTH_MAX if kind == "bag" else None)
    assert program.signature == SIGNATURES[kind]
    assert program.dtype is torch.float32
    for rows, length in ((1, 1), (2, 5), (7, LENGTH_MAX), (64, 2)):
        inputs = make_inputs(kind, rows, length)
        with torch.inference_mode():
            expected, found = module(**inputs), program.run(inputs)
        named = expected if isinstance(expected, dict) else dict(
            zip(found, expected if isinstance(expected, tuple) else [expected], strict=True)
        )  # fmt: skip
        assert found.keys() == named.keys()
        for name, tensor in named.items():
            assert torch.allclose(found[name], tensor, atol=1e-5), name


def test_a_weight_that_is_changed_shows(written: Callable[[str], tuple[Path, torch.nn.Module]]) -> None:
    folder, module = written("dense")
    program = ExportedProgram(folder, CPU, None)
    inputs = make_inputs("dense", 2, 1)
    with torch.inference_mode():
        next(tensor for name, tensor in program._values.items() if "second_weight" in name).mul_(1.01)
        found = program.run(inputs)["scores"]
        assert isinstance(found, torch.Tensor)
        assert not torch.allclose(found, module(**inputs)["scores"], atol=1e-5)


@pytest.mark.slow
def test_lengths_without_a_limit_take_that_of_the_configuration(tmp_path: Path) -> None:
    module = torch.nn.Linear(2, 2).eval()
    program = export(module, (torch.zeros(2, 3, 2),), dynamic_shapes=({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},))
    save(program, tmp_path / "model.pt2")
    with pytest.raises(ModelError, match=r"no limit: export it with torch.export.Dim.* or set `max_model_len`"):
        ExportedProgram(tmp_path, CPU, None)
    assert ExportedProgram(tmp_path, CPU, 9).signature.lengths["length"][1] == 9


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"ragged": "pad", "mask": "attention"}, "names 'attention', and the inputs of the program are ids, mask"),
        ({"ragged": "pad", "mask": "mask", "outputs": ["one"]}, "has 2 outputs"),
        ({"mask": "mask"}, 'are for `ragged: "pad"`'),
        ({"ragged": "pack"}, "need each other"),
        ({"ragged": "fold"}, "model.json: Invalid enum value 'fold'"),
        ({"raged": "pad"}, "unknown field `raged`"),
        ({"ragged": "pad", "mask": 5}, "Expected `str"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    settings: dict[str, Any], words: str, tmp_path: Path, written: Callable[[str], tuple[Path, torch.nn.Module]]
) -> None:
    (tmp_path / "model.pt2").write_bytes((written("encoder")[0] / "model.pt2").read_bytes())
    (tmp_path / "model.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match=words):
        ExportedProgram(tmp_path, CPU, None)


class Counts(torch.nn.Module):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return x + self.calls


class Branches(torch.nn.Module):
    """Has control flow."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))
        return result


@pytest.mark.parametrize(
    ("module", "dynamic", "words"),
    [
        (torch.nn.Linear(2, 2), None, "must be one that varies, the batch"),
        (Counts(), {0: Dim("batch")}, "keeps nothing between requests"),
        (Branches(), {0: Dim("batch")}, "Programs with control flow"),
        (torch.nn.Linear(2, 2), {0: Dim("batch", min=3, max=8)}, "takes no batch of 1"),
    ],
    ids=["static", "buffer", "cond", "four"],
)
def test_a_program_that_is_no_model_is_refused(
    module: torch.nn.Module, dynamic: Any, words: str, tmp_path: Path
) -> None:
    program = export(module.eval(), (torch.zeros(4, 2),), dynamic_shapes=None if dynamic is None else (dynamic,))
    save(program, tmp_path / "model.pt2")
    with pytest.raises(ModelError, match=words):
        ExportedProgram(tmp_path, CPU, None)


class Image(torch.nn.Module):
    """Has layers that change tensors in place, and normalization with statistics."""

    def __init__(self, *, frozen: bool = True) -> None:
        super().__init__()
        self.conv, self.relu = torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(inplace=True)
        self.norm, self.frozen = torch.nn.BatchNorm2d(4), frozen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        norm = self.norm
        x = torch.batch_norm(
            x, norm.weight, norm.bias, norm.running_mean, norm.running_var, not self.frozen, 0.1, 1e-5, False
        )
        x = self.relu(x)
        return x.abs_().mean((2, 3))


def export_image(module: torch.nn.Module) -> Any:
    return export(module.eval(), (torch.zeros(2, 3, 5, 5),), dynamic_shapes=({0: Dim("batch", max=8)},))


@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, None], ids=["functional", "core"])
def test_decompositions_make_a_program_that_runs(how: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Image()
    save(export_image(module), tmp_path / "model.pt2")
    with pytest.raises(ModelError, match=r"calls 'torch.ops.aten.abs_.default'.*Save program.run_decompositions"):
        ExportedProgram(tmp_path, CPU, None)
    save(export_image(module).run_decompositions(how), tmp_path / "model.pt2")
    inputs = {"x": torch.randn(3, 3, 5, 5)}
    with torch.inference_mode():
        found = ExportedProgram(tmp_path, CPU, None).run(inputs)["output"]
        assert isinstance(found, torch.Tensor)
        assert torch.allclose(found, module(**inputs), atol=1e-5)


class Hides(torch.nn.Module):
    """Changes a weight through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu_((x + 1).mul_(2)) + self.weight.view(2)


def test_a_weight_is_not_changed_through_a_view(tmp_path: Path) -> None:
    save(export(Hides(), (torch.zeros(4, 2),), dynamic_shapes=({0: Dim("batch")},)), tmp_path / "model.pt2")
    inputs = {"x": torch.ones(3, 2)}
    with torch.inference_mode():
        assert torch.equal(ExportedProgram(tmp_path, CPU, None).run(inputs)["output"], torch.full((3, 2), 4.0))

    def change(content: Any) -> None:
        nodes = content["graph_module"]["graph"]["nodes"]
        view = next(node for node in nodes if node["target"].endswith("view.default"))
        nodes.remove(view)
        nodes.insert(0, view)
        changes = next(node for node in nodes if node["target"].endswith("mul_.Tensor"))
        changes["inputs"][0]["arg"]["as_tensor"]["name"] = view["outputs"][0]["as_tensor"]["name"]

    rewrite(tmp_path / "model.pt2", tmp_path / "other", edit("/models/model.json", change))
    (tmp_path / "other").replace(tmp_path / "model.pt2")
    with torch.inference_mode(), pytest.raises(ModelError, match="changes a weight"):
        ExportedProgram(tmp_path, CPU, None).run(inputs)


def test_statistics_are_not_updated(tmp_path: Path) -> None:
    module = Image(frozen=False)
    save(export_image(module), tmp_path / "model.pt2")
    with pytest.raises(ModelError, match=r"batch_norm.*keeps nothing between requests"):
        ExportedProgram(tmp_path, CPU, None)
    save(
        export(Counts(), (torch.zeros(4, 2),), dynamic_shapes=({0: Dim("batch")},)).run_decompositions({}),
        tmp_path / "model.pt2",
    )
    with pytest.raises(ModelError, match=r"buffer_mutation.*keeps nothing between requests"):
        ExportedProgram(tmp_path, CPU, None)
