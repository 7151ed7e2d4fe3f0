"""Tests that the engine accepts each configuration that the API accepts and the operator passes on."""

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from tests.api.builders import build_body, build_full_body

import conveyor_engine
from conveyor_api import names
from conveyor_api.batching import DEFAULT_WINDOWS, KVCacheDtype
from conveyor_api.crd import build_schema
from conveyor_api.engine import Device, ReasoningParser, Task, ToolParser
from conveyor_api.env import FREE_ENGINE_SETTINGS
from conveyor_api.model import (
    _BUCKET_PATTERN,
    _HUB_PATTERN,
    _IMAGE_PATTERN,
    _VOLUME_PATTERN,
    BucketModel,
    HubModel,
    Quantization,
    parse_model_uri,
)
from conveyor_api.quantities import parse_duration_seconds
from conveyor_api.resource import InferenceService
from conveyor_api.speculation import SpeculationMethod
from conveyor_engine.config import engine_config
from conveyor_engine.config.engine_config import DEFAULT_MEMORY_FRACTION, EngineConfig
from conveyor_engine.config.sources import parse_config
from conveyor_engine.errors import ConfigError
from conveyor_engine.execution.limits import choose_batch_limits
from conveyor_engine.fetching.uris import parse_uri
from conveyor_engine.registry import load_about
from conveyor_engine.scheduling import policy
from conveyor_engine.text.parsing.formats import FORMATS, LIST
from conveyor_engine.text.parsing.thinking import MARKS
from conveyor_operator.inferenceservice.desired import build_owner
from conveyor_operator.inferenceservice.manifests.config import RESOURCE_FIELDS, build_engine_config
from conveyor_protocol.tasks import TASKS
from conveyor_protocol.workload import Lengths, Workload
from e2e.cluster.paths import REPOSITORY

FIELDS = {field.name: field for field in dataclasses.fields(EngineConfig)}
# The engine takes these alone further than the API does: for tests and for whoever runs it by hand.
WIDER = {"kvCache.blockSize", "kvCache.memoryPercent", "batching.window"}
OWNER = build_owner("default", "qwen", "1")
MODES = ("None", "Static", "Dynamic", "Continuous")
EDGES: tuple[dict[str, Any], ...] = (
    {},
    {"batching": {"maxBatchSize": 1, "maxBatchTokens": 1}, "engine": {"maxQueuedRequests": 1}},
    {"batching": {"maxBatchSize": 1024, "maxBatchTokens": 16_777_216}, "engine": {"maxQueuedRequests": 100_000}},
    {"engine": {"maxModelLen": 2, "device": "Auto", "dtype": "Float16"}, "kvCache": {"blockBudget": 1, "blockSize": 8}},
    {"engine": {"maxModelLen": 16_777_216, "dtype": "Float32"}, "kvCache": {"memoryPercent": 1}},
    {"engine": {"dtype": "BFloat16"}, "kvCache": {"memoryPercent": 99, "blockSize": 128}},
    {"workload": {"inputTokens": {"p50": 1, "p95": 1}, "outputTokens": {"p50": 1, "p95": 1}}},
    {"workload": {"inputTokens": {"p50": 1, "p95": 16_777_216}, "outputTokens": {"p50": 1, "p95": 16_777_216}}},
    {"requestTimeout": "1s", "drain": {"timeout": "0s"}},
    {"requestTimeout": "24h", "drain": {"timeout": "1h"}},
)


def read_as_engine(body: dict[str, Any], folder: Path) -> EngineConfig:
    """Return the engine's configuration from the file that the operator writes for `body`."""
    file = folder / names.ENGINE_CONFIG_KEY
    file.write_text(build_engine_config(OWNER, InferenceService.parse(body).spec).text, encoding="utf-8")
    return parse_config({"config": file}, {})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("edge", EDGES, ids=str)
def test_the_engine_takes_what_the_api_accepts(mode: str, edge: dict[str, Any], tmp_path: Path) -> None:
    spec = edge | {"batching": {"mode": mode} | edge.get("batching", {})}
    assert read_as_engine(build_body(**spec), tmp_path).batching_mode == mode.lower()


@pytest.mark.parametrize("latency", ["1ms", "1h"])
@pytest.mark.parametrize("mode", ["Continuous", "Dynamic"])
@pytest.mark.parametrize("name", ["timeToFirstToken", "interTokenLatency", "latency"])
def test_the_engine_takes_the_shortest_and_the_longest_objective(
    name: str, mode: str, latency: str, tmp_path: Path
) -> None:
    body = build_body(batching={"mode": mode, "objectives": {name: latency}})
    config = read_as_engine(body, tmp_path)
    setting = {field: setting for setting, field in RESOURCE_FIELDS.items()}[f"batching.objectives.{name}"]
    assert getattr(config, setting) == parse_duration_seconds(latency)


@pytest.mark.parametrize("window", ["1ms", "1h"])
@pytest.mark.parametrize("mode", ["Static", "Dynamic"])
def test_the_engine_takes_the_shortest_and_the_longest_window(mode: str, window: str, tmp_path: Path) -> None:
    body = build_body(batching={"mode": mode, "window": window})
    expected = InferenceService.parse(body).spec.batching.window_seconds
    assert read_as_engine(body, tmp_path).batching_window_seconds == pytest.approx(expected)


@pytest.mark.parametrize("example", sorted((REPOSITORY / "examples").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_engine_takes_an_example_and_the_list_says_its_mode(example: Path, tmp_path: Path) -> None:
    row = next(line for line in (REPOSITORY / "examples/README.md").read_text().splitlines() if example.name in line)
    body = yaml.safe_load(example.read_text())
    if body["spec"].get("runtime") == "VLLM":
        return
    mode = read_as_engine(body, tmp_path).batching_mode
    assert f"| {'Continuous, the default' if mode == 'auto' else mode.title()}" in row


@pytest.mark.parametrize("task", get_args(Task))
def test_the_engine_has_each_task_of_the_api(task: str, tmp_path: Path) -> None:
    assert read_as_engine(build_body(task=task), tmp_path).task == task.lower()
    assert load_about(task.lower()).allows is TASKS[task]


def test_mode_and_task_are_the_engine_s_choice_where_nothing_is_said(tmp_path: Path) -> None:
    config = read_as_engine(build_body(), tmp_path)
    assert (config.task, config.batching_mode, config.batching_window_seconds) == ("auto", "auto", None)


def test_every_requested_setting_arrives(tmp_path: Path) -> None:
    config = read_as_engine(build_full_body(), tmp_path)
    assert config.model == "/models/hf/Qwen/Qwen3-0.6B/refs--pr--1"
    assert config.task == "generate"
    assert (config.served_model_name, config.device, config.dtype) == ("Qwen/Qwen3-0.6B", "auto", "bfloat16")
    assert config.sampling_defaults == "openai"
    assert config.adapters_file == "/adapters/list/adapters.yaml"
    assert config.class_shares == ((100, 50),)
    assert (config.max_model_len, config.num_kv_blocks, config.block_size) == (4096, 512, 32)
    assert config.kv_cache_dtype == "fp8"
    assert (config.max_num_seqs, config.max_num_batched_tokens, config.max_num_queued_requests) == (16, 2048, 64)
    assert (config.request_timeout_seconds, config.drain_timeout_seconds) == (300, 60)
    assert config.objective_time_to_first_token_seconds == 0.5
    assert config.objective_inter_token_latency_seconds == 0.04
    assert config.workload == Workload(Lengths(256, 1024), Lengths(128, 512))


def test_the_documented_objectives_arrive(tmp_path: Path) -> None:
    page = (REPOSITORY / "docs/objectives.md").read_text()
    block = page.split("```yaml\n")[1].split("```")[0]
    config = read_as_engine(build_body(**yaml.safe_load(block)["spec"]), tmp_path)
    assert (config.max_num_seqs, config.objective_inter_token_latency_seconds) == (64, 0.04)
    assert config.objective_time_to_first_token_seconds == 0.5


def test_every_type_of_the_cache_arrives(tmp_path: Path) -> None:
    arrived = [
        read_as_engine(build_body(kvCache={"dtype": dtype}), tmp_path).kv_cache_dtype
        for dtype in get_args(KVCacheDtype)
    ]
    assert arrived == list(get_args(engine_config.KVCacheDtype))


def test_every_quantization_arrives(tmp_path: Path) -> None:
    model = build_body()["spec"]["model"]
    arrived = [
        read_as_engine(
            build_body(model={**model, "quantization": quantization}, engine={"device": "Auto"}), tmp_path
        ).quantization
        for quantization in get_args(Quantization)
    ]
    assert arrived == list(get_args(engine_config.Quantization))


def test_every_method_of_speculation_arrives(tmp_path: Path) -> None:
    arrived = [
        read_as_engine(
            build_body(speculation={"method": method, **drafts}, engine={"device": "Auto"}), tmp_path
        ).speculation
        for method, drafts in zip(get_args(SpeculationMethod), ({}, {"draft": {"uri": "hf://a/b"}}, {}), strict=True)
    ]
    assert arrived == list(get_args(engine_config.SpeculationMethod))


def test_every_tool_parser_arrives(tmp_path: Path) -> None:
    arrived = [
        read_as_engine(build_body(engine={"toolParser": parser}), tmp_path).tool_parser
        for parser in get_args(ToolParser)
    ]
    assert arrived == list(get_args(engine_config.ToolParser))
    assert {*arrived} - {"auto", "none"} == FORMATS.keys() - {LIST}


def test_every_reasoning_parser_arrives(tmp_path: Path) -> None:
    arrived = [
        read_as_engine(build_body(engine={"reasoningParser": parser}), tmp_path).reasoning_parser
        for parser in get_args(ReasoningParser)
    ]
    assert arrived == list(get_args(engine_config.ReasoningParser))
    assert {*arrived} - {"auto", "none"} == MARKS.keys()


def test_the_page_s_hosts_of_images_arrive(tmp_path: Path) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", (REPOSITORY / "docs/images-in-chats.md").read_text(), re.DOTALL)
    (block,) = (each for each in blocks if "mediaHosts" in each)
    config = read_as_engine(yaml.safe_load(block), tmp_path)
    assert config.media_hosts == ("images.example.com", "cdn.example.com:8443")


def test_each_engine_setting_is_the_specs_or_free() -> None:
    """A new setting of the engine needs a field in the spec, or an entry in the list of settings for `pod.env`."""
    settings = {field.name for field in dataclasses.fields(EngineConfig)}
    body = build_full_body()
    written = set(yaml.safe_load(build_engine_config(OWNER, InferenceService.parse(body).spec).text))
    free = {setting.lower() for setting in FREE_ENGINE_SETTINGS}
    assert not written & free
    # By num_kv_blocks, the objectives of tokens, a task that generates, a cache, n-grams; the last is written above 1.
    excluded = {"kv_memory_fraction", "objective_latency_seconds", "model_class", "adapters_folder", "draft_model"}
    excluded |= {"tensor_parallel_size"}
    by_hand = {"host", "tls_folder", "callers_file", "adapters"}  # the pod's own, or by hand
    assert settings - written - free == excluded | by_hand
    named = set(RESOURCE_FIELDS)
    assert named == written - {"port"} | excluded, "and has a name that people know"


def test_the_name_that_people_know_of_a_setting_is_a_field_of_the_spec() -> None:
    for field in RESOURCE_FIELDS.values():
        assert find_schema(field)["description"], field


def test_what_the_engine_says_of_its_settings_is_said_of_the_spec() -> None:
    """Every message that ends an engine names settings in backticks, and only settings that exist."""
    settings = {field.name for field in dataclasses.fields(EngineConfig)}
    quoted = {
        name
        for file in Path(conveyor_engine.__file__).parent.rglob("*.py")
        for text in find_sentences(file)
        for name in re.findall(r"`([a-z_]+)(?:: [a-z0-9{}.]+)?`", text)
    }
    assert {"num_kv_blocks", "max_model_len", "device", "dtype"} <= quoted <= settings


def find_sentences(file: Path) -> Iterator[str]:
    """Return the messages of StartErrors in a file."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            called = node.exc.func
            if isinstance(called, ast.Name) and called.id in ("ConfigError", "ModelError"):
                yield " ".join(
                    c.value for c in ast.walk(node) if isinstance(c, ast.Constant) and isinstance(c.value, str)
                )


def find_schema(field: str) -> dict[str, Any]:
    schema: dict[str, Any] = build_schema()["properties"]["spec"]
    for name in field.split("."):
        schema = schema["properties"][name]
    return schema


@pytest.mark.parametrize(("setting", "field"), RESOURCE_FIELDS.items())
def test_a_number_may_be_as_large_for_the_engine_as_for_the_api(setting: str, field: str) -> None:
    schema = find_schema(field)
    if schema["type"] != "integer" or field in WIDER:
        return
    read = FIELDS[setting].metadata["kind"].parse
    assert read(str(schema["maximum"])) == schema["maximum"]
    assert read(str(schema["minimum"])) == schema["minimum"]
    with pytest.raises(ValueError, match=str(schema["maximum"] + 1)):
        read(str(schema["maximum"] + 1))


def test_what_api_and_engine_do_by_themselves_is_the_same() -> None:
    modes = {"Static": policy.STATIC_WINDOW_SECONDS, "Dynamic": policy.DYNAMIC_WINDOW_SECONDS}
    assert modes == {mode: parse_duration_seconds(window) for mode, window in DEFAULT_WINDOWS.items()}
    share = f"`{DEFAULT_MEMORY_FRACTION:.0%}`".replace("%", "")
    assert share in find_schema("kvCache.memoryPercent")["description"]
    assert share in (REPOSITORY / "docs" / "sizing.md").read_text()
    for setting, field in RESOURCE_FIELDS.items():
        if setting in ("max_num_queued_requests", "block_size", "speculation_tokens"):
            assert FIELDS[setting].default == find_schema(field)["default"], setting


@pytest.mark.parametrize("batching", [{}, {"maxBatchTokens": 100}, {"maxBatchSize": 40}, {"mode": "None"}], ids=str)
@pytest.mark.parametrize("is_given", [True, False])
@pytest.mark.parametrize("task", [*get_args(Task)])
@pytest.mark.parametrize("device", get_args(Device))
def test_an_engine_has_the_batch_of_the_status(
    device: str, task: str, is_given: bool, batching: dict[str, Any], tmp_path: Path
) -> None:
    """A GPU is there. is_given: whether the spec names the task; otherwise a pod has read it from the files."""
    if task == "Custom" and not is_given:
        return
    body = build_body(task=task if is_given else None, engine={"device": device}, batching=batching)
    body["status"] = {"model": {"uri": body["spec"]["model"]["uri"], "task": task}}
    config = read_as_engine(body, tmp_path)
    size, _ = choose_batch_limits(config, torch.device("cuda"), task.lower())
    assert size == InferenceService.parse(body).batching.effective_batch_size


HUB = st.from_regex(_HUB_PATTERN.removeprefix("^").removesuffix("$"), fullmatch=True)
BUCKET = st.from_regex(_BUCKET_PATTERN.removeprefix("^").removesuffix("$"), fullmatch=True)
CLAIM = st.from_regex(_VOLUME_PATTERN.removeprefix("^").removesuffix("$"), fullmatch=True)
IMAGE = st.from_regex(_IMAGE_PATTERN.removeprefix("^").removesuffix("$"), fullmatch=True)


@given(
    HUB
    | BUCKET
    | CLAIM
    | IMAGE
    | st.builds("{}{}".format, HUB, st.sampled_from(("@", "/", " ", "\n", "..", "ä", "@-", "x" * 200)))
)
@example(f"hf://{'a' * 96}/b@main")
@example(f"hf://{'a' * 97}/b")
@example(f"hf://a/b@{'c' * 129}")
@example("hf://.a/b")
@example("pvc://a/../b")
@example("pvc://a")
@example("oci://a/b:1//c/../d")
@example("oci://a")
@example("s3://abc/../b")
@example("s3://abc")
def test_the_engine_fetches_from_where_the_api_says_and_nowhere_else(uri: str) -> None:
    try:
        source = parse_model_uri(uri)
    except ValueError:
        with pytest.raises(ConfigError):
            parse_uri(uri)
        return
    if isinstance(source, HubModel):
        assert parse_uri(uri) == (source.repository, source.revision, source.file)
    elif isinstance(source, BucketModel):
        assert parse_uri(uri) == (source.bucket, source.prefix)
    else:
        assert parse_uri(uri) is None


def test_the_gpus_of_the_page_become_ranks(tmp_path: Path) -> None:
    page = (REPOSITORY / "docs/several-gpus.md").read_text()
    (block,) = (part.split("```")[0] for part in page.split("```yaml\n")[1:])
    for changes, ranks in (({}, 2), ({"task": "Embed"}, 1), ({"engine": {"tensorParallelSize": 1}}, 1)):
        spec = yaml.safe_load(block)["spec"] | changes
        assert read_as_engine(build_body(**spec), tmp_path).tensor_parallel_size == ranks
