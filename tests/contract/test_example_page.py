"""Compares the page in examples/ with the engine's OpenAPI document."""

import re
from typing import Any

import pytest
from tests.openapi import find_event_schema

from conveyor_engine.serving.http.openapi import build_document
from e2e.cluster.paths import REPOSITORY

PAGE = (REPOSITORY / "examples" / "speech-and-pictures.html").read_text()
DOCUMENT = build_document()
SCHEMAS = DOCUMENT["components"]["schemas"]
SENT = {
    "TranscriptionForm": {"model", "file", "stream", "response_format"},
    "ImageGenerationRequest": {"model", "prompt", "num_inference_steps", "seed", "stream", "partial_images"},
}
READ = {
    "TranscriptTextDelta": {"delta"},
    "TranscriptTextDone": {"text"},
    "VerboseTranscription": {"segments"},
    "TranscriptionSegment": {"start", "end", "text"},
    "PartialPicture": {"b64_json", "partial_image_index"},
    "CompletedPicture": {"b64_json", "seed"},
}
PATHS = {"/v1/audio/transcriptions", "/v1/images/generations"}


def events_of(path: str) -> set[str]:
    events = find_event_schema(DOCUMENT["paths"][path]["post"])["oneOf"]
    names = [event["$ref"].rpartition("/")[2] for event in events]
    names.remove("ErrorAnswer")  # it has no type
    return {name for schema in names for name in SCHEMAS[schema]["properties"]["type"]["enum"]}


def test_the_page_s_paths_and_events_are_those_of_the_document() -> None:
    assert set(re.findall(r'"(/v1/[^"]+)"', PAGE)) == PATHS
    assert set(re.findall(r'event\.type === "([^"]+)"', PAGE)) == set().union(*map(events_of, PATHS))


@pytest.mark.parametrize(("schema", "fields"), [*SENT.items(), *READ.items()])
def test_the_page_s_fields_are_those_of_the_document(schema: str, fields: set[str]) -> None:
    known: dict[str, Any] = SCHEMAS[schema]["properties"]
    assert fields <= set(known)
    pattern = r"\b{}:" if schema in SENT else r"\.{}\b"
    assert [name for name in fields if not re.search(pattern.format(name), PAGE)] == []


def test_the_page_loads_nothing_from_elsewhere() -> None:
    assert re.findall(r"(?:src|href)=\"", PAGE) == []
    assert "default-src 'none'" in PAGE
