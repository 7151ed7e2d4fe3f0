"""Builds the HTTP request for each task, with about the wanted number of tokens. Pure.

A prompt consists of short words that are one token each in most vocabularies. `sending.calibrate` measures
`Target.tokens_per_word`, so that lengths are right for any tokenizer. Each request has its own random words, so that
no prompt is in a prefix cache.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

from conveyor_load.traces import Arrival

_TEXT: Final = (
    "the of and to in is that it was for on are as with his they be at one have this from or had by hot but some "
    "what there we can out other were all your when up use word how said each she which do their time if will way "
    "about many then them would write like so these her long make thing see him two has look more day could go come "
    "did my sound no most number who over know water than call first people may down side been now find "
)
_WORDS: Final = _TEXT.split()

# Paths below the URL of a service.
PATHS: Final = {
    "Generate": "/v1/completions",
    "Embed": "/v1/embeddings",
    "Rerank": "/v1/rerank",
    "Classify": "/classify",
}


@dataclass(frozen=True, slots=True)
class Target:
    """A service: the URL before `/v1`, the name in `model`, the model's task, and headers for proxies on the way."""

    url: str
    model: str
    task: str = "Generate"
    headers: Mapping[str, str] = field(default_factory=dict)
    tokens_per_word: float = 1.0
    extra_tokens: float = 0.0

    @property
    def endpoint(self) -> str:
        return self.url + PATHS[self.task]

    @property
    def streams(self) -> bool:
        return self.task == "Generate"


def build_body(target: Target, arrival: Arrival, random: Random) -> bytes:
    """Return the JSON of one request. Generated texts have exactly the arrival's number of output tokens."""
    words = max(1, round((arrival.input_tokens - target.extra_tokens) / target.tokens_per_word))
    return json.dumps({"model": target.model, **_build(target.task, words, arrival.output_tokens, random)}).encode()


def _build(task: str, words: int, output_tokens: int, random: Random) -> Mapping[str, Any]:
    text = " ".join(random.choices(_WORDS, k=words))
    match task:
        case "Embed" | "Classify":
            return {"input": text}
        case "Rerank":
            query, _, document = text.partition(" ")
            return {"query": query, "documents": [document or query]}
        case _:
            options = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
            return {"prompt": text, "max_tokens": max(1, output_tokens), "ignore_eos": True, **options}
