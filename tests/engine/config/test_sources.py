import argparse
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.config.sources import add_flags, parse_config
from conveyor_engine.errors import ConfigError
from conveyor_protocol.workload import Lengths


def parse(*arguments: str, environment: dict[str, str] | None = None) -> EngineConfig:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return parse_config(vars(parser.parse_args(arguments)), environment or {})


def write(folder: Path, text: str) -> str:
    path = folder / "engine.yaml"
    path.write_text(text)
    return str(path)


WORKLOAD = "workload_input_tokens: 10,20\nworkload_output_tokens: 10,12\n"


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    path = write(tmp_path, "model: /file\nport: 1\nblock_size: 8\nmax_num_seqs: 2\n")
    environment = {"CONVEYOR_ENGINE_PORT": "2", "CONVEYOR_ENGINE_MAX_NUM_SEQS": "3", "PATH": "/bin"}
    config = parse("--config", path, "--max-num-seqs", "4", environment=environment)
    assert (config.model, config.max_num_seqs, config.port, config.block_size) == ("/file", 4, 2, 8)
    assert config.host == ""


def test_every_field_can_be_a_flag_a_variable_and_a_key(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "model": "/m", "served_model_name": "s", "adapters": (("a", "/a"), ("b.c", "/b=d")),
        "adapters_file": "/adapters.yaml", "adapters_folder": "/adapters", "adapter_slots": 3, "task": "custom",
        "model_class": "a.b:C",
        "device": "auto", "dtype": "bfloat16", "quantization": "int4",
        "max_model_len": 99, "sampling_defaults": "openai", "tool_parser": "mistral",
        "reasoning_parser": "think",
        "batching_mode": "static", "max_num_seqs": 3, "batching_window_seconds": 0.5, "batching_eager": True,
        "length_grouping": "off", "max_num_batched_tokens": 64,
        "speculation": None, "draft_model": None, "speculation_tokens": 5,
        "max_num_queued_requests": 7, "objective_time_to_first_token_seconds": None,
        "objective_inter_token_latency_seconds": None, "objective_latency_seconds": None,
        "class_shares": ((5, 50), (9, 20)),
        "num_kv_blocks": 11, "kv_memory_fraction": None, "kv_cache_dtype": "int8", "block_size": 32,
        "workload_input_tokens": Lengths(20, 30), "workload_output_tokens": Lengths(1, 2),
        "prefix_caching": False, "attention_backend": "torch", "enforce_eager": True,
        "request_timeout_seconds": 5.0, "drain_timeout_seconds": 6.0, "host": "::1", "port": 81, "tls_folder": "/t",
        "callers_file": "/c.json", "media_hosts": ("a.example", "b.example:8443"), "padding": "real",
        "tensor_parallel_size": 1, "num_threads": 2, "log_format": "json", "warmup": False,
    }  # fmt: skip
    assert list(values) == [field.name for field in dataclasses.fields(EngineConfig)]
    given = {name: value for name, value in values.items() if value is not None}
    text = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in given.items()}
    text |= {"class_shares": "9:20,5:50", "adapters": "a=/a, b.c=/b=d"}
    text |= {"media_hosts": "a.example, B.example:8443"}
    text |= {"workload_input_tokens": "20,30", "workload_output_tokens": "1,2"}
    by_flag = parse(*[part for n, v in text.items() for part in (f"--{n.replace('_', '-')}", v)])
    by_variable = parse(environment={f"CONVEYOR_ENGINE_{n.upper()}": v for n, v in text.items()})
    lines = [f'{n}: "{v}"' if isinstance(given[n], str | Lengths) else f"{n}: {v}" for n, v in text.items()]
    lines = ["class_shares: {'9': 20, 5: 50}" if line.startswith("class_shares") else line for line in lines]
    lines = ["adapters: {a: /a, b.c: /b=d}" if line.startswith("adapters:") else line for line in lines]
    by_file = parse("--config", write(tmp_path, "\n".join(lines)))
    assert by_flag == by_variable == by_file == EngineConfig(**values)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: /m\nmax_seqs: 3", "unknown key 'max_seqs'"),
        ("model: /m\nport: '80'", "port must be a port number from 0 to 65535, not '80'"),
        ("model: /m\nport: 80.5", "port must be a port number"),
        ("model: /m\nport: true", "port must be a port number"),
        ("model: /m\nport: null", "port must be a port number from 0 to 65535, not null"),
        ("model: /m\nport: 65536", "port must be a port number from 0 to 65535, not '65536'"),
        ("model: /m\nwarmup: 1", "warmup must be true or false"),
        ("model: /m\ndevice: gpu", "device must be one of cuda, cpu, auto, not 'gpu'"),
        ("model: /m\nmax_num_seqs: 0", "max_num_seqs must be a whole number from 1 to 1024"),
        ("model: /m\nkv_memory_fraction: 1.5", "kv_memory_fraction must be a number from 0.01 to 1, not '1.5'"),
        ("model: /m\nkv_memory_fraction: .nan", "kv_memory_fraction must be a number"),
        ("model: /m\nnum_kv_blocks: 5\nkv_memory_fraction: 0.5", "exclude each other"),
        ("model: /m\nbatching_window_seconds: 1", "is for batching_mode: static and batching_mode: dynamic alone"),
        ("model: /m\nbatching_eager: true", "batching_eager is for batching_mode: static and batching_mode: dynamic"),
        ("model: /m\nlength_grouping: off", "length_grouping is for batching_mode: static and batching_mode: dynamic"),
        ("model: /m\nspeculation: ngram\nbatching_mode: static", "speculation is not for batching_mode: static"),
        ("model: /m\nspeculation: oracle", "speculation must be one of ngram, draft, mtp, not 'oracle'"),
        ("model: /m\nspeculation: draft", "speculation draft needs draft_model: give both"),
        ("model: /m\ndraft_model: /d", "draft_model is for speculation: draft alone"),
        (
            "model: /m\nspeculation: draft\ndraft_model: /d\ntensor_parallel_size: 2",
            "draft_model and tensor_parallel_size exclude each other",
        ),
        ("model: /m\nspeculation_tokens: 17", "speculation_tokens must be a whole number from 1 to 16"),
        ("model: /m\npadding: real", "padding is for batching_mode: static alone"),
        ("model: ''", "model must be text that is not empty"),
        ("model: 5", "model must be text"),
        ("port: 5", "model is missing"),
        ("model: /m\nmodel: /n", "appears twice"),
        ("[1, 2]", "one mapping"),
        ("model: {a: 1}", "model must be text"),
        ("model: /m\nclass_shares: {5: 101}", "whole percentages from 1 to 100, as 50:40,100:20, not '5:101'"),
        ("model: /m\nclass_shares: {5: 10, '5': 20}", "class_shares must be levels from 0 to 1000"),
        ("model: /m\nclass_shares: {1001: 10}", "not '1001:10'"),
        ("model: /m\nclass_shares: {best: 10}", "not 'best:10'"),
        ("model: /m\nclass_shares: [5]", "class_shares must be levels"),
        ("model: /m\nadapters: {a: /a}\ntensor_parallel_size: 2", "adapters and tensor_parallel_size exclude each"),
        (
            "model: /m\nadapters: {a/b: /a}",
            "adapters must be at most 1000 names with directories, as sql=/adapters/sql",
        ),
        ("model: /m\nadapters: {a: ''}", "not 'a='"),
        ("model: /m\nadapters: a=/a,a=/b", "not 'a=/b'"),
        ("model: /m\nworkload_input_tokens: 20,10", "tokens at P50 and P95, from 1 to 16777216 and in this order"),
        ("model: /m\nworkload_input_tokens: '20'", "as 256,1024, not '20'"),
        ("model: /m\nworkload_input_tokens: 0,1", "not '0,1'"),
        ("model: /m\nworkload_output_tokens: 1,2", "workload_output_tokens needs workload_input_tokens"),
        (f"model: /m\n{WORKLOAD}max_model_len: 31", "have 32 tokens at P95, more than max_model_len, 31"),
        (f"model: /m\n{WORKLOAD}num_kv_blocks: 1", "more than num_kv_blocks x block_size, 16"),
        ("model: [", "is not YAML"),
        ("1: 2", "one mapping"),
    ],
)
def test_a_bad_file_is_refused_in_words(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse("--config", write(tmp_path, text))
    assert words in str(caught.value).replace("`", "")
    assert caught.value.reason == "InvalidConfig"


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        parse("--config", str(tmp_path / "none.yaml"))


def test_the_origin_of_a_bad_value_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="flag --port: `port` must be a port number from 0 to 65535, not 'x'"):
        parse("--model", "/m", "--port", "x")
    with pytest.raises(ConfigError, match="environment variable CONVEYOR_ENGINE_PORT"):
        parse("--model", "/m", environment={"CONVEYOR_ENGINE_PORT": "tcp://10.0.0.1:80"})
    path = write(tmp_path, "model: /m\nport: -1")
    with pytest.raises(ConfigError, match=re.escape(f"file {path}: `port`")):
        parse("--config", path)


def test_an_unknown_variable_is_refused() -> None:
    with pytest.raises(ConfigError, match="CONVEYOR_ENGINE_SPEED: unknown key 'speed'"):
        parse("--model", "/m", environment={"CONVEYOR_ENGINE_SPEED": "1"})
