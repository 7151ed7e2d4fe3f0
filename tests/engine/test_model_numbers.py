"""Numbers of a config.json that no model can have."""

import json
from pathlib import Path
from typing import Any

import pytest

from conveyor_engine.errors import ModelError
from conveyor_engine.model_numbers import check_numbers


def check(folder: Path, config: object) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    check_numbers(folder)


def test_published_models_pass(tmp_path: Path) -> None:
    check_numbers(tmp_path)
    llama = {"num_hidden_layers": 126, "hidden_size": 16384, "max_position_embeddings": 131072, "vocab_size": 128256}
    check(tmp_path, llama | {"rope_theta": 10**10, "num_attention_heads": 128, "tie_word_embeddings": False})
    check(tmp_path, {"text_config": {"num_hidden_layers": 48, "max_position_embeddings": 10_485_760}})
    check(tmp_path, {"num_hidden_layers": 61, "n_routed_experts": 384, "kv_lora_rank": 512, "first_k_dense_replace": 1})
    check(tmp_path, {"depths": [3, 4, 6, 3], "hidden_sizes": [256, 512, 1024, 2048], "mlp_only_layers": [*range(94)]})
    check(tmp_path, {"n_layer": 48, "n_embd": 1600, "n_ctx": 1024, "n_head": 25, "model_max_length": 1e30})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, and may be 4096 at most"),
        ({"text_config": {"num_layers": 5000}}, "text_config.num_layers is 5000"),
        ({"max_position_embeddings": 10**12}, "max_position_embeddings is 1000000000000, and may be 16777216 at most"),
        ({"hidden_size": float("inf")}, "hidden_size is inf"),
        ({"vocab_size": -(10**400)}, "vocab_size is -1000"),
        ({"head_dim": 2**30}, "head_dim is 1073741824"),
        ({"num_local_experts": 10**6}, "num_local_experts is 1000000"),
        ({"hidden_sizes": [64, 10**9]}, "hidden_sizes is 1000000000"),
        ({"depths": [1, 10**9]}, "depths is 1000000001"),
        ({"depths": [4096] * 100}, "depths is 409600"),
        ({"stages": [{"embed_dims": [[10**9]]}]}, "stages.embed_dims is 1000000000"),
        ({"num_hidden_layers": 4096, "num_experts": 4096}, "layers times experts are 16777216"),
    ],
)
def test_a_number_that_no_model_has_is_refused_by_name(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as caught:
        check(tmp_path, config)
    assert message in str(caught.value)
    assert caught.value.reason == "UnsupportedModel"


def test_a_config_that_is_too_deep_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    with pytest.raises(ModelError, match="cannot be read"):
        check_numbers(tmp_path)
