"""Tests programs of torch.export: their inputs are derived correctly, and they compute the same as torch."""

import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.tasks.custom.programs import LENGTH_MAX, WRITERS
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


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, torch.nn.Module]]:
    """Return a function that returns a folder with a program of a kind, and the module that it was exported from."""
    made: dict[str, tuple[Path, torch.nn.Module]] = {}

    def get(kind: str) -> tuple[Path, torch.nn.Module]:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            made[kind] = folder, WRITERS[kind](folder)
        return made[kind]

    return get


def make_inputs(kind: str, rows: int, length: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(rows * 100 + length)
    match kind:
        case "dense":
            return {"features": torch.randn(rows, 4), "kind": torch.randint(0, 9, (rows,))}
        case "encoder":
            mask = torch.arange(length) < torch.randint(1, length + 1, (rows,))[:, None]
            return {"ids": torch.randint(0, 16, (rows, length)), "mask": mask}
        case "bag":
            offsets = torch.arange(rows + 1) * length
            return {"ids": torch.randint(0, 16, (rows * length,)), "offsets": offsets}
        case _:
            return {"pixels": torch.randint(0, 255, (rows, 1, length % 8 + 1, 3), dtype=torch.uint8)}


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


# --- hostile archives ---


class Runs:
    """An object whose pickle runs code when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return (Path.touch, (self.marker,))


def rewrite(source: Path, target: Path, change: Callable[[str, bytes], bytes | None], **how: Any) -> None:
    """Copy the archive and apply `change` to each file."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", **how) as new:
        for entry in old.infolist():
            if (data := change(entry.filename, old.read(entry))) is not None:
                new.writestr(entry.filename, data)


def edit(name: str, change: Callable[[Any], None]) -> Callable[[str, bytes], bytes]:
    """Return a `change` that edits one JSON file."""

    def apply(path: str, data: bytes) -> bytes:
        if not path.endswith(name):
            return data
        content = json.loads(data)
        change(content)
        return json.dumps(content).encode()

    return apply


def first_node(content: Any) -> Any:
    return next(node for node in content["graph_module"]["graph"]["nodes"] if node["target"].endswith("linear.default"))


def call(target: str, *arguments: Any) -> Callable[[Any], None]:
    def change(content: Any) -> None:
        node = first_node(content)
        node["target"] = target
        if arguments:
            node["inputs"] = [{"name": f"a{i}", "arg": each, "kind": 1} for i, each in enumerate(arguments)]

    return change


def set_use_pickle(config: Any) -> None:
    for entry in config["config"].values():
        entry["use_pickle"] = True


def set_object(config: Any) -> None:
    for entry in config["config"].values():
        entry["path_name"] = "opaque_obj_0"


def set_beyond(config: Any) -> None:
    for entry in config["config"].values():
        entry["tensor_meta"]["storage_offset"] = {"as_int": 10**9}


def rename_node(content: Any) -> None:
    first_node(content)["outputs"][0]["as_tensor"]["name"] = "x; import os"


def set_expression(content: Any) -> None:
    content["graph_module"]["graph"]["tensor_values"]["features"]["sizes"][0] = {"as_expr": {"expr_str": CODE}}


CODE = "__import__('os').system('touch /tmp/evaluated')"
TENSOR = {"as_tensor": {"name": "features"}}
TEXT = {"as_string": "/tmp/written"}
ATTACKS: dict[str, tuple[str, Callable[[Any], None], str]] = {
    "pickled weight": ("_weights_config.json", set_use_pickle, "is a pickle or an object"),
    "pickled constant": ("_constants_config.json", set_use_pickle, "is a pickle or an object"),
    "object": ("_constants_config.json", set_object, "is a pickle or an object"),
    "storage": ("_weights_config.json", set_beyond, "cannot be read: RuntimeError"),
    "system": ("/models/model.json", call("torch.os.system", TEXT), "calls 'torch.os.system'"),
    "hub": ("/models/model.json", call("torch.hub.load", TEXT, TEXT), "calls 'torch.hub.load'"),
    "load": ("/models/model.json", call("torch.load", TEXT), "calls 'torch.load'"),
    "operator": ("/models/model.json", call("_operator.methodcaller", TEXT), "calls '_operator.methodcaller'"),
    "attribute": ("/models/model.json", call("torch.ops.aten.linear.__class__"), "which this engine does not run"),
    "packet": ("/models/model.json", call("torch.ops.aten.__class__.default"), "which this engine does not run"),
    "file": ("/models/model.json", call("torch.ops.aten.from_file.default", TEXT), "calls 'torch.ops.aten.from_file"),
    "save": ("/models/model.json", call("torch.ops.aten.save.default", {"as_none": True}, TEXT), "does not run"),
    "seed": ("/models/model.json", call("torch.ops.aten.manual_seed.default", {"as_int": 1}), "does not run"),
    "sparse": (
        "/models/model.json",
        call("torch.ops.aten._sparse_coo_tensor_unsafe.default"),
        "does not run: it runs a list",
    ),
    "type": (
        "/models/model.json",
        call("torch.ops.aten.softmax.int", TENSOR, {"as_int": -1}, {"as_int": 2**40}),
        "'dtype' of torch.ops.aten.softmax.int of the program must be a dtype, not 1099511627776",
    ),
    "library": ("/models/model.json", call("torch.ops.mine.op.default"), "operators of other libraries"),
    "extension": ("/models/model.json", call("#mine:op"), "does not run"),
    "graph": ("/models/model.json", call("torch.ops.aten.add.Tensor", {"as_graph": {}}), "kind 'as_graph'"),
    "callable": ("/models/model.json", call("torch.ops.aten.add.Tensor", {"as_operator": "torch.os.system"}), "as_op"),
    "name": ("/models/model.json", rename_node, "an invalid name"),
    "expression": ("/models/model.json", set_expression, "must be one that varies"),
    "version": ("/models/model.json", lambda content: content["schema_version"].update(major=9), "export it again"),
    "empty": ("/models/model.json", dict.clear, "cannot be read: KeyError"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_could_run_code_is_refused(
    attack: str, tmp_path: Path, written: Callable[[str], tuple[Path, torch.nn.Module]]
) -> None:
    name, change, words = ATTACKS[attack]
    rewrite(written("dense")[0] / "model.pt2", tmp_path / "model.pt2", edit(name, change))
    with pytest.raises(ModelError, match=words):
        ExportedProgram(tmp_path, CPU, None)
    assert not Path("/tmp/evaluated").exists()
    assert not Path("/tmp/written").exists()


def test_what_is_not_needed_is_not_read(tmp_path: Path, written: Callable[[str], tuple[Path, torch.nn.Module]]) -> None:
    """torch.export.load unpickles the sample inputs, and evaluates guards, metadata and expressions."""
    marker = tmp_path / "ran"

    def change(path: str, data: bytes) -> bytes:
        if "/sample_inputs/" in path:
            return pickle.dumps(Runs(marker))
        return edit("/models/model.json", spoil)(path, data)

    def spoil(content: Any) -> None:
        content["guards_code"] = [CODE]
        graph = content["graph_module"]["graph"]
        for node in graph["nodes"]:
            node["metadata"] = {"source_fn_stack": "a,torch.os.system", "nn_module_stack": CODE}
        for meta in graph["tensor_values"].values():
            meta["strides"] = [{"as_expr": {"expr_str": CODE}}]

    rewrite(written("dense")[0] / "model.pt2", tmp_path / "model.pt2", change)
    program = ExportedProgram(tmp_path, CPU, None)
    inputs = make_inputs("dense", 3, 1)
    with torch.inference_mode():
        found = program.run(inputs)["scores"]
        assert isinstance(found, torch.Tensor)
        assert torch.allclose(found, written("dense")[1](**inputs)["scores"], atol=1e-5)
    assert not marker.exists()
    assert not Path("/tmp/evaluated").exists()


@pytest.mark.parametrize("how", ["not a zip", "cut", "compressed", "deep", "two", "none"])
def test_a_file_that_is_no_program_is_refused(
    how: str, tmp_path: Path, written: Callable[[str], tuple[Path, torch.nn.Module]]
) -> None:
    source, target = written("dense")[0] / "model.pt2", tmp_path / "model.pt2"
    match how:
        case "not a zip":
            target.write_bytes(b"\x80\x04 a pickle")
        case "cut":
            target.write_bytes(source.read_bytes()[:-1000])
        case "compressed":
            rewrite(source, target, lambda _, data: data, compression=zipfile.ZIP_DEFLATED)
        case "deep":
            rewrite(source, target, lambda path, data: b"[" * 200_000 if path.endswith("model.json") else data)
        case "two":
            rewrite(source, target, lambda _, data: data)
            with zipfile.ZipFile(target, "a") as more:
                more.writestr("model/models/other.json", b"{}")
        case "none":
            rewrite(source, target, lambda path, data: None if path.endswith("/models/model.json") else data)
    with pytest.raises(ModelError, match=r"torch\.export\.save|cannot be read"):
        ExportedProgram(tmp_path, CPU, None)
