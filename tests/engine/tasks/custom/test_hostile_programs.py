"""Tests that a program of torch.export cannot run code, and that a file that is no such program is refused."""

import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.tasks.custom.programs import edit, make_inputs, rewrite

from conveyor_engine.errors import ModelError
from conveyor_engine.tasks.custom.execution.exported import ExportedProgram

CPU = torch.device("cpu")


class Runs:
    """An object whose pickle runs code when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return (Path.touch, (self.marker,))


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


@pytest.mark.parametrize("how", ["not a zip", "cut", "longer", "compressed", "deep", "two", "none"])
def test_a_file_that_is_no_program_is_refused(
    how: str, tmp_path: Path, written: Callable[[str], tuple[Path, torch.nn.Module]]
) -> None:
    source, target = written("dense")[0] / "model.pt2", tmp_path / "model.pt2"
    match how:
        case "not a zip":
            target.write_bytes(b"\x80\x04 a pickle")
        case "cut":
            target.write_bytes(source.read_bytes()[:-1000])
        case "longer":  # its directory says that an entry goes on behind the end of the file
            content = bytearray(source.read_bytes())
            at = content.rindex(b"PK\x01\x02", 0, content.rindex(b"/models/model.json"))
            content[at + 20 : at + 28] = struct.pack("<II", 1 << 24, 1 << 24)
            target.write_bytes(content)
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
