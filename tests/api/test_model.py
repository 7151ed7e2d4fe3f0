"""A uri that the API server accepts is one that the parser takes apart, and its folder stays where it belongs."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conveyor_api.model import BucketModel, HubModel, ImageModel, VolumeModel, parse_model_uri


def test_a_hub_uri_names_repository_and_revision() -> None:
    assert parse_model_uri("hf://Qwen/Qwen3-0.6B") == HubModel("Qwen/Qwen3-0.6B", "main")
    assert parse_model_uri("hf://Qwen/Qwen3-0.6B@v1") == HubModel("Qwen/Qwen3-0.6B", "v1")


def test_a_hub_uri_may_name_a_file() -> None:
    assert parse_model_uri("hf://a/b:Q4_K_M") == HubModel("a/b", "main", "Q4_K_M")
    assert parse_model_uri("hf://a/b@v1:b-Q8_0.gguf") == HubModel("a/b", "v1", "b-Q8_0.gguf")
    assert parse_model_uri("hf://a/b@v1:Q8_0").directory == "/models/hf/a/b/v1~Q8_0"


def test_a_hub_model_has_one_folder_per_revision() -> None:
    assert parse_model_uri("hf://a/b").directory == "/models/hf/a/b/main"
    assert parse_model_uri("hf://a/b@refs/pr/1").directory == "/models/hf/a/b/refs--pr--1"


def test_a_volume_uri_names_claim_and_path() -> None:
    model = parse_model_uri("pvc://models/llms/qwen@2")
    assert model == VolumeModel("models", "llms/qwen@2")
    assert model.directory == "/models/pvc/llms/qwen@2"


def test_a_bucket_uri_names_bucket_and_prefix() -> None:
    model = parse_model_uri("s3://models.example/teams/a@2")
    assert model == BucketModel("models.example", "teams/a@2")
    assert model.directory == "/models/s3/models.example/teams/a@2/~model"


@pytest.mark.parametrize(
    ("uri", "reference", "directory"),
    [
        ("oci://quay.io/team/qwen", "quay.io/team/qwen", "/models/oci"),
        ("oci://localhost:5000/a/b__c:1.0", "localhost:5000/a/b__c:1.0", "/models/oci"),
        (f"oci://quay.io/q:1@sha256:{'a' * 64}", f"quay.io/q:1@sha256:{'a' * 64}", "/models/oci"),
        ("oci://quay.io/team/qwen:1//models/qwen", "quay.io/team/qwen:1", "/models/oci/models/qwen"),
    ],
)
def test_an_image_uri_names_what_is_pulled_and_the_folder_in_it(uri: str, reference: str, directory: str) -> None:
    model = parse_model_uri(uri)
    assert isinstance(model, ImageModel)
    assert (model.reference, model.directory) == (reference, directory)


@pytest.mark.parametrize(
    "uri",
    [
        "oci://quay.io",
        "oci://quay.io/Team/qwen",
        "oci://quay.io/team/qwen:1/models",
        "oci://quay.io/team/qwen@sha256:1",
        "oci://quay.io/team//../etc",
        "s3://models",
        "s3://models/",
        "s3://models/a/..",
        "s3://Models/a",
        "s3://ab/c~d",
        "",
        "hf://a",
        "hf://a/b@",
        "hf://../b",
        "pvc://a",
        "pvc://a//b",
        "pvc://a/../b",
        "a/b",
    ],
)
def test_what_is_neither_is_refused(uri: str) -> None:
    with pytest.raises(ValueError, match="neither hf://"):
        parse_model_uri(uri)


@settings(deadline=None)
@given(
    st.sampled_from(["hf://a/b@", "hf://a/", "s3://abc/", "pvc://a/", "oci://a/b//"]),
    st.text("ab./@-", min_size=1, max_size=12),
)
def test_no_accepted_uri_leaves_the_models_folder(start: str, end: str) -> None:
    try:
        directory = parse_model_uri(start + end).directory
    except ValueError:
        return
    assert directory.startswith(("/models/hf/", "/models/s3/", "/models/pvc/", "/models/oci/"))
    assert not {"", ".", ".."} & set(directory.removeprefix("/").split("/"))
