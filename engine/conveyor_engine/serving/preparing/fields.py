"""One table of the fields of OpenAI, Anthropic, vLLM, SGLang, Cohere and Jina that are accepted but have no effect.

A field that cannot change the answer is ignored. So is a field that asks for more than the engine does, if the answer
is still a true answer to the request; such fields are counted (ADR 145). Any other field is accepted only with a value
that changes nothing. `schemas` has the fields with an effect, and validates all others against this table.
docs/openai-fields.md and the tests are generated from it. Pure.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

OPENAI, VLLM, SGLANG, COHERE, JINA = "OpenAI", "vLLM", "SGLang", "Cohere", "Jina"
ANTHROPIC = "Anthropic"


class Place(StrEnum):
    """The JSON object that contains a field."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    EMBEDDINGS = "embeddings"
    RERANK = "rerank"
    SCORE = "score"
    CLASSIFY = "classify"
    TOKENIZE = "tokenize"
    MESSAGES = "messages"
    RESPONSES = "responses"
    IMAGES = "image generation"
    STREAM_OPTIONS = "`stream_options`"
    MESSAGE = "a message"


BOTH = (Place.CHAT, Place.COMPLETIONS)


@dataclass(frozen=True, slots=True)
class Row:
    """One field. Null is always accepted and means that the field is absent."""

    name: str
    defined_by: tuple[str, ...]
    places: tuple[Place, ...] = BOTH
    only: tuple[object, ...] = ()  # the values other than null that change nothing
    why_ignored: str = ""  # why any value is accepted; empty: only null and the values in `only` are
    is_unmet: bool = False  # whether the field asks for something that the engine leaves out; `only`: for nothing
    instead: str = ""  # why other values are rejected, and what to send instead

    def refusal(self, value: object) -> str | None:
        """Return the error for this value, without the field's name in front; None if the value is accepted."""
        if value is None or self.why_ignored or any(_equal(value, neutral) for neutral in self.only):
            return None
        what = f"is not supported by this engine; leave it out (or send {self.accepted_values()})"
        return f"{what}: {self.instead}" if self.instead else what

    def counts(self, value: object) -> bool:
        """Return whether this value asks for something that the engine leaves out."""
        return self.is_unmet and value is not None and not any(_equal(value, neutral) for neutral in self.only)

    def schema(self) -> dict[str, object]:
        """Return the JSON Schema of the field's values."""
        if self.why_ignored:
            return {"description": f"Ignored: it {self.why_ignored}."}
        return {"description": "Accepted only with values that change nothing.", "enum": [None, *self.only]}

    def accepted_values(self) -> str:
        """Return the accepted values as JSON, for error messages and docs."""
        return ", ".join(["null", *map(_as_json, self.only)])


def _equal(value: object, neutral: object) -> bool:
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _as_json(value: object) -> str:
    return repr(value).lower().replace("'", '"')


_LABEL = "labels the request or its user"
_PLACE = "selects where, when or with what help the request is computed"
_CACHE = "is a hint for a prompt cache; prefixes are cached in any case"
_KEY = "has no effect in the engine; the gateway chooses the engine by it (prefixes.md)"
_NO_BEAMS = "beam search is not supported; send `n` and a `seed`"
_WITHOUT = "concerns inputs that the path does not accept, or a kind of answer that this engine does not give"
_HOSTED = "concerns tools that OpenAI runs"
_STORES = "this server stores nothing; send the whole conversation as `input`, or set `store: false` in the client"
_TIER = "asks for a price or a speed; every request gets the service's own"
_UNSTORED = (
    "asks to store the answer; this server stores nothing, and an answer of the Responses API has `store: false`"
)
_UNSEARCHED = "offers what only the maker's servers can run; the model does not see it"
_UNTRAINED = "sets a length that the model's template has no place for"
_WHOLE = "allows the server to shorten the conversation; the engine never does"
_UNPADDED = "asks for padding that hides the lengths of events; the engine sends none"
_SPACES = "concerns slow tokenizers, which this engine does not use"


def _ignored(why: str, by: Iterable[str], *names: str, on: tuple[Place, ...] = BOTH) -> Iterator[Row]:
    for name in names:
        yield Row(name, tuple(by), on, why_ignored=why)


def _unmet(
    why: str, neutral: tuple[object, ...], by: Iterable[str], *names: str, on: tuple[Place, ...] = BOTH
) -> Iterator[Row]:
    for name in names:
        yield Row(name, tuple(by), on, only=neutral, why_ignored=why, is_unmet=True)


def _only(
    values: tuple[object, ...], by: Iterable[str], *names: str, on: tuple[Place, ...] = BOTH, instead: str = ""
) -> Iterator[Row]:
    for name in names:
        yield Row(name, tuple(by), on, only=values, instead=instead)


_ALL = (OPENAI, VLLM, SGLANG)
_ENGINES = (VLLM, SGLANG)
_CHAT = (Place.CHAT,)
_COMPLETIONS = (Place.COMPLETIONS,)
_EMBEDDINGS = (Place.EMBEDDINGS,)
_PAIRS = (Place.RERANK, Place.SCORE)
_CLASSIFY = (Place.CLASSIFY,)
_MESSAGES = (Place.MESSAGES,)
_RESPONSES = (Place.RESPONSES,)
_IMAGES = (Place.IMAGES,)
_INPUTS = (*_EMBEDDINGS, *_CLASSIFY)
_EVERYWHERE = (*BOTH, Place.EMBEDDINGS, *_PAIRS, *_CLASSIFY)

TABLE: tuple[Row, ...] = (
    *_ignored(_LABEL, _ALL, "user", on=_EVERYWHERE),
    *_ignored(_LABEL, [OPENAI], "safety_identifier", "metadata"),
    *_ignored(_LABEL, [OPENAI], "user", "safety_identifier", on=_IMAGES),
    *_ignored(_LABEL, [VLLM], "request_id", on=_EVERYWHERE),
    *_ignored(_LABEL, _ENGINES, "session_id"),
    *_ignored(_LABEL, [SGLANG], "rid", on=_EVERYWHERE),
    *_ignored(_LABEL, [SGLANG], "custom_labels"),
    *_ignored(_PLACE, [VLLM], "stream_interval"),
    *_ignored(_PLACE, [SGLANG], "routed_dp_rank", "disagg_prefill_dp_rank", "data_parallel_rank"),
    *_ignored(_PLACE, [SGLANG], "bootstrap_host", "bootstrap_port", "bootstrap_room", "ngram_corpus_id"),
    *_ignored(_KEY, [OPENAI], "prompt_cache_key"),
    *_ignored(_CACHE, [OPENAI], "prompt_cache_retention", "prompt_cache_options", on=(*BOTH, *_RESPONSES)),
    *_ignored(_HOSTED, [OPENAI], "max_tool_calls", on=_RESPONSES),
    *_ignored(_LABEL, [VLLM], "request_id", on=_RESPONSES),
    *_ignored(_WITHOUT, [SGLANG], "separate_reasoning", "stream_reasoning", on=_CHAT),
    *_ignored(_WITHOUT, [VLLM], "media_io_kwargs", on=(*_CHAT, *_INPUTS, Place.TOKENIZE)),
    *_ignored(_WITHOUT, [VLLM], "mm_processor_kwargs", on=(*_CHAT, *_INPUTS, *_PAIRS, Place.TOKENIZE)),
    *_ignored(_WITHOUT, [SGLANG], "images_config"),
    *_ignored(_WITHOUT, [SGLANG], "max_dynamic_patch", "min_dynamic_patch", on=_CHAT),
    *_ignored(_WITHOUT, [SGLANG], "use_audio_in_video", on=_CHAT),
    *_ignored(_LABEL, [ANTHROPIC], "metadata", "user_profile_id", "workspace_id", on=_MESSAGES),
    *_ignored(_CACHE, [ANTHROPIC], "cache_control", on=_MESSAGES),
    *_ignored(_PLACE, [ANTHROPIC], "inference_geo", "diagnostics", on=_MESSAGES),
    *_ignored(_SPACES, [VLLM], "spaces_between_special_tokens"),
    *_ignored(_WITHOUT, [VLLM], "return_token_offsets", "return_mm_kwargs"),
    *_ignored(_WITHOUT, [OPENAI], "annotations", on=(Place.MESSAGE,)),
    # what a client asks for in vain: the answer is right without it
    *_unmet(_TIER, ("auto", "default"), [OPENAI], "service_tier", on=(*BOTH, *_RESPONSES)),
    *_unmet(_TIER, ("auto", "standard_only"), [ANTHROPIC], "service_tier", on=_MESSAGES),
    *_unmet(_TIER, ("standard",), [ANTHROPIC], "speed", on=_MESSAGES),
    *_unmet(_UNSTORED, (False,), [OPENAI], "store", on=(*_CHAT, *_RESPONSES)),
    *_unmet(_UNSEARCHED, (), [OPENAI], "web_search_options", on=_CHAT),
    *_unmet(_UNSEARCHED, ([],), [ANTHROPIC], "mcp_servers", on=_MESSAGES),
    *_unmet(_UNSEARCHED, (), [ANTHROPIC], "container", on=_MESSAGES),
    *_unmet(_UNTRAINED, ("medium",), [OPENAI], "verbosity", on=_CHAT),
    *_unmet(_WHOLE, ("disabled",), [OPENAI], "truncation", on=_RESPONSES),
    *_unmet(_WHOLE, ([],), [OPENAI], "context_management", on=_RESPONSES),
    *_unmet(_WHOLE, ({},), [ANTHROPIC], "context_management", on=_MESSAGES),
    *_unmet(_UNPADDED, (False,), [OPENAI], "include_obfuscation", on=(Place.STREAM_OPTIONS,)),
    # how a picture is made and encoded
    *_only(("auto", "standard"), [OPENAI], "quality", on=_IMAGES, instead="send `num_inference_steps`"),
    *_only((), [OPENAI], "style", on=_IMAGES, instead="write it into the prompt"),
    *_only(("auto", "opaque"), [OPENAI], "background", on=_IMAGES),
    *_only(("auto", "low"), [OPENAI], "moderation", on=_IMAGES, instead="pictures are not checked"),
    *_only(("png",), [OPENAI], "output_format", on=_IMAGES),
    *_only((100,), [OPENAI], "output_compression", on=_IMAGES, instead="PNG loses nothing"),
    *_only((1,), [OPENAI], "frame_count", on=_IMAGES),
    *_only((), [OPENAI], "mask", "markup", on=_IMAGES, instead="an edit changes the whole picture"),
    *_only(("low",), [OPENAI], "input_fidelity", on=_IMAGES, instead="send a smaller `strength`"),
    *_only((), [OPENAI], "complexity", "frame_duration_ms", "svg", on=_IMAGES),
    # how tokens are chosen
    *_only((1,), [OPENAI, SGLANG], "best_of", instead="every choice is returned: send `n`, and take the best of them"),
    *_only((False,), [VLLM], "use_beam_search", instead=_NO_BEAMS),
    *_only((1,), [VLLM], "length_penalty", instead=_NO_BEAMS),
    *_only((False,), [VLLM], "watermarking"),
    *_only(([],), [VLLM], "logits_processors"),
    *_only((), [VLLM], "repetition_detection"),
    *_only((-1,), [VLLM], "thinking_token_budget", on=_COMPLETIONS),
    *_only(({},), [VLLM], "vllm_xargs"),
    *_only(({},), [SGLANG], "custom_params"),
    *_only((), [SGLANG], "custom_logit_processor", "lora_path", "session_params"),
    # what the prompt is
    *_only((False,), [VLLM], "add_special_tokens", on=_CHAT),
    *_only((True,), [VLLM], "add_special_tokens", on=_COMPLETIONS),
    *_only((), [VLLM], "prompt_embeds", on=_COMPLETIONS),
    *_only(("",), _ALL, "suffix", on=_COMPLETIONS),
    *_only((), [VLLM], "chat_template", on=(*_CHAT, *_INPUTS, Place.TOKENIZE)),
    *_only((), [SGLANG], "input_ids", "task", on=_CHAT),
    # how an input becomes a vector
    *_only((), [VLLM], "normalize", on=_EMBEDDINGS, instead="send `use_activation`"),
    *_only((), [VLLM], "late_chunking_params", on=_EMBEDDINGS, instead="send the chunks as inputs"),
    *_only(("do_not_pad",), [VLLM], "padding", on=_PAIRS),
    # which texts are compared
    *_only(({},), [VLLM], "chat_template_kwargs", on=_PAIRS),
    *_only((["text"],), [COHERE], "rank_fields", on=(Place.RERANK,)),
    *_only((1,), [COHERE], "max_chunks_per_doc", on=(Place.RERANK,)),
    *_only((False,), [JINA], "return_embeddings", on=(Place.RERANK,)),
    # when the answer ends, and what the response reports about it
    *_only((False,), [SGLANG], "no_stop_trim"),
    *_only(([],), [SGLANG], "stop_regex"),
    *_only((False,), [VLLM], "return_weight_versions"),
    *_only((False,), [VLLM], "return_prompt_text", on=_CHAT),
    *_only((0,), [VLLM], "routed_experts_prompt_start"),
    *_only((False,), [SGLANG], "return_hidden_states", "return_routed_experts", "return_cached_tokens_details"),
    *_only((False,), [SGLANG], "return_prompt_token_ids", "return_meta_info", on=_CHAT),
    *_only((0,), [SGLANG], "routed_experts_start_len"),
    *_only((False,), [OPENAI], "background", on=_RESPONSES, instead=_STORES),
    *_only((), [OPENAI], "previous_response_id", "conversation", "prompt", on=_RESPONSES, instead=_STORES),
    *_only((), [OPENAI], "moderation", "access_programs", "image", on=_RESPONSES),
    # which requests share prefixes: accepting these would promise what this engine does not do
    *_only((), [SGLANG], "extra_key"),
    *_only(({},), [VLLM], "kv_transfer_params", "ec_transfer_params"),
    *_only(({},), [VLLM], "kv_transfer_params", on=_MESSAGES),
    # tools, reasoning and media
    *_only(([],), [OPENAI], "functions", on=_CHAT, instead="send `tools`"),
    *_only(("none", "auto"), [OPENAI], "function_call", on=_CHAT, instead="send `tool_choice`"),
    *_only((["text"],), [OPENAI], "modalities", on=_CHAT),
    *_only((), [OPENAI], "audio", "moderation", on=_CHAT),
    *_only((), [VLLM], "mm_payload", on=_CHAT),
    *_only((), [OPENAI], "function_call", on=(Place.MESSAGE,), instead="send `tool_calls`"),
    *_only((), [OPENAI], "audio", on=(Place.MESSAGE,)),
    *_only(([],), [SGLANG], "tools", on=(Place.MESSAGE,)),
)  # fmt: skip

ROWS: dict[Place, dict[str, Row]] = {place: {row.name: row for row in TABLE if place in row.places} for place in Place}
