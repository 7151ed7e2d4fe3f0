"""The fields of OpenAI, vLLM, SGLang, Cohere and Jina that this engine knows and does not act on: one table.

A field that cannot change the answer is ignored. One that could is accepted only with a value that changes nothing.
`schemas` validates by this table (it has the fields that act), and docs/openai-fields.md and the tests are made from
it. Pure.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

OPENAI, VLLM, SGLANG, COHERE, JINA = "OpenAI", "vLLM", "SGLang", "Cohere", "Jina"


class Place(StrEnum):
    """The JSON object that a field stands in."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    EMBEDDINGS = "embeddings"
    RERANK = "rerank"
    SCORE = "score"
    CLASSIFY = "classify"
    STREAM_OPTIONS = "`stream_options`"
    MESSAGE = "a message"


BOTH = (Place.CHAT, Place.COMPLETIONS)


@dataclass(frozen=True, slots=True)
class Row:
    """One field. Null is accepted everywhere, and means that the field is absent."""

    name: str
    defined_by: tuple[str, ...]
    places: tuple[Place, ...] = BOTH
    only: tuple[object, ...] = ()  # the values that change nothing, beside null
    why_ignored: str = ""  # why any value is accepted

    def refusal(self, value: object) -> str | None:
        """The end of a sentence that begins with the field's name; None if this value is accepted."""
        if value is None or self.why_ignored or any(_equal(value, neutral) for neutral in self.only):
            return None
        return f"is not supported by this engine; leave it out (or send {self.accepted_values()})"

    def schema(self) -> dict[str, object]:
        """The same as JSON Schema."""
        if self.why_ignored:
            return {"description": f"Ignored: it {self.why_ignored}."}
        return {"description": "Accepted only with what changes nothing.", "enum": [None, *self.only]}

    def accepted_values(self) -> str:
        """As JSON, for people."""
        return ", ".join(["null", *map(_as_json, self.only)])


def _equal(value: object, neutral: object) -> bool:
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _as_json(value: object) -> str:
    return repr(value).lower().replace("'", '"')


_LABEL = "labels the request or its user"
_PLACE = "says where, when or with which help it is computed"
_CACHE = "advises a prompt cache, and prefixes are cached in any case"
_WITHOUT = "is about tools, reasoning, media or special tokens in the text, of which there are none"


def _ignored(why: str, by: Iterable[str], *names: str, on: tuple[Place, ...] = BOTH) -> Iterator[Row]:
    for name in names:
        yield Row(name, tuple(by), on, why_ignored=why)


def _only(values: tuple[object, ...], by: Iterable[str], *names: str, on: tuple[Place, ...] = BOTH) -> Iterator[Row]:
    for name in names:
        yield Row(name, tuple(by), on, only=values)


_ALL = (OPENAI, VLLM, SGLANG)
_ENGINES = (VLLM, SGLANG)
_CHAT = (Place.CHAT,)
_COMPLETIONS = (Place.COMPLETIONS,)
_EMBEDDINGS = (Place.EMBEDDINGS,)
_PAIRS = (Place.RERANK, Place.SCORE)
_CLASSIFY = (Place.CLASSIFY,)
_EVERYWHERE = (*BOTH, Place.EMBEDDINGS, *_PAIRS, *_CLASSIFY)

TABLE: tuple[Row, ...] = (
    *_ignored(_LABEL, _ALL, "user", on=_EVERYWHERE),
    *_ignored(_LABEL, [OPENAI], "safety_identifier", "metadata"),
    *_ignored(_LABEL, [VLLM], "request_id", on=_EVERYWHERE),
    *_ignored(_LABEL, _ENGINES, "session_id"),
    *_ignored(_LABEL, [SGLANG], "rid", on=_EVERYWHERE),
    *_ignored(_LABEL, [SGLANG], "custom_labels"),
    *_ignored(_PLACE, [OPENAI], "prediction", on=_CHAT),
    *_ignored(_PLACE, [VLLM], "stream_interval"),
    *_ignored(_PLACE, [SGLANG], "routed_dp_rank", "disagg_prefill_dp_rank", "data_parallel_rank"),
    *_ignored(_PLACE, [SGLANG], "bootstrap_host", "bootstrap_port", "bootstrap_room", "ngram_corpus_id"),
    *_ignored(_CACHE, [OPENAI], "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
    *_ignored(_WITHOUT, _ALL, "parallel_tool_calls", on=_CHAT),
    *_ignored(_WITHOUT, [SGLANG], "separate_reasoning", "stream_reasoning", on=_CHAT),
    *_ignored(_WITHOUT, [VLLM], "media_io_kwargs", on=_CHAT),
    *_ignored(_WITHOUT, [VLLM], "mm_processor_kwargs", on=(*_CHAT, *_PAIRS)),
    *_ignored(_WITHOUT, [SGLANG], "images_config"),
    *_ignored(_WITHOUT, [SGLANG], "max_dynamic_patch", "min_dynamic_patch", on=_CHAT),
    *_ignored(_WITHOUT, [SGLANG], "use_audio_in_video", on=_CHAT),
    *_ignored(_WITHOUT, [VLLM], "spaces_between_special_tokens", "return_token_offsets", "return_mm_kwargs"),
    *_ignored(_WITHOUT, [OPENAI], "annotations", on=(Place.MESSAGE,)),
    # when it is computed: accepted, this would promise what is not done
    *_only(("auto", "default"), [OPENAI], "service_tier"),
    # how tokens are chosen
    *_only((0,), _ALL, "presence_penalty", "frequency_penalty"),
    *_only((1,), _ENGINES, "repetition_penalty"),
    *_only((0,), _ENGINES, "min_p"),
    *_only(({},), _ALL, "logit_bias"),
    *_only((1,), [OPENAI, SGLANG], "best_of"),
    *_only((False,), [VLLM], "use_beam_search", "watermarking"),
    *_only((1,), [VLLM], "length_penalty"),
    *_only(([],), [VLLM], "bad_words", "logits_processors"),
    *_only((), [VLLM], "allowed_token_ids", "repetition_detection"),
    *_only((-1,), [VLLM], "thinking_token_budget"),
    *_only(({},), [VLLM], "vllm_xargs"),
    *_only(({},), [SGLANG], "custom_params"),
    *_only((), [SGLANG], "custom_logit_processor", "lora_path", "session_params"),
    # structured output
    *_only(({"type": "text"},), _ALL, "response_format"),
    *_only((), [VLLM], "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *_only((), [SGLANG], "json_schema", "regex", "ebnf"),
    # what the prompt is
    *_only((False,), [VLLM], "add_special_tokens", "echo", on=_CHAT),
    *_only((True,), [VLLM], "add_special_tokens", on=(*_COMPLETIONS, *_EMBEDDINGS, *_CLASSIFY)),
    *_only((), [VLLM], "prompt_embeds", on=_COMPLETIONS),
    *_only((False,), _ALL, "echo", on=_COMPLETIONS),
    *_only(("",), _ALL, "suffix", on=_COMPLETIONS),
    *_only((True,), [VLLM], "add_generation_prompt", on=_CHAT),
    *_only((False,), _ENGINES, "continue_final_message", on=_CHAT),
    *_only(([],), [VLLM], "documents", on=_CHAT),
    *_only((), [VLLM], "chat_template", on=_CHAT),
    *_only((), [SGLANG], "input_ids", "task", on=_CHAT),
    # what its vector is
    *_only(("float32",), [VLLM], "embed_dtype", on=_EMBEDDINGS),
    *_only(("native", "little"), [VLLM], "endianness", on=_EMBEDDINGS),
    *_only((), [VLLM], "normalize", "use_activation", on=_EMBEDDINGS),
    *_only(("do_not_pad",), [VLLM], "padding", on=_EMBEDDINGS),
    # what is compared with what
    *_only((), [VLLM], "messages", on=_CLASSIFY),
    *_only((), [VLLM], "instruction", on=_PAIRS),
    *_only(({},), [VLLM], "chat_template_kwargs", on=_PAIRS),
    *_only((["text"],), [COHERE], "rank_fields", on=(Place.RERANK,)),
    *_only((1,), [COHERE], "max_chunks_per_doc", on=(Place.RERANK,)),
    *_only((False,), [JINA], "return_embeddings", on=(Place.RERANK,)),
    # when it ends, and what is told of it
    *_only((False,), [VLLM], "include_stop_str_in_output"),
    *_only((False,), [SGLANG], "no_stop_trim"),
    *_only(([],), [SGLANG], "stop_regex"),
    *_only((True,), _ENGINES, "skip_special_tokens"),
    *_only((), [VLLM], "prompt_logprobs", "logprob_token_ids"),
    *_only((False,), _ENGINES, "return_token_ids"),
    *_only((False,), [VLLM], "return_tokens_as_token_ids", "return_weight_versions"),
    *_only((False,), [VLLM], "return_prompt_text", on=_CHAT),
    *_only((0,), [VLLM], "routed_experts_prompt_start"),
    *_only((False,), [SGLANG], "return_hidden_states", "return_routed_experts", "return_cached_tokens_details"),
    *_only((False,), [SGLANG], "return_prompt_token_ids", "return_meta_info", on=_CHAT),
    *_only((0,), [SGLANG], "routed_experts_start_len"),
    *_only((False,), [OPENAI], "store", on=_CHAT),
    *_only((False,), [OPENAI], "include_obfuscation", on=(Place.STREAM_OPTIONS,)),
    # whose prefixes are shared with whom: accepted, these would promise what is not done
    *_only((), [SGLANG], "extra_key"),
    *_only(({},), [VLLM], "kv_transfer_params", "ec_transfer_params"),
    # tools, reasoning and media
    *_only(([],), _ALL, "tools", on=_CHAT),
    *_only(("none", "auto"), _ALL, "tool_choice", on=_CHAT),
    *_only(([],), [OPENAI], "functions", on=_CHAT),
    *_only(("none", "auto"), [OPENAI], "function_call", on=_CHAT),
    *_only((["text"],), [OPENAI], "modalities", on=_CHAT),
    *_only((), [OPENAI], "audio", "moderation", "web_search_options", on=_CHAT),
    *_only(("none",), _ALL, "reasoning_effort", on=_CHAT),
    *_only((), [SGLANG], "reasoning", on=_CHAT),
    *_only((), [VLLM], "mm_payload", on=_CHAT),
    *_only((True,), [VLLM], "include_reasoning", on=_CHAT),
    *_only(("medium",), [OPENAI], "verbosity", on=_CHAT),
    *_only((), [OPENAI], "refusal", "function_call", "audio", on=(Place.MESSAGE,)),
    *_only(([],), _ALL, "tool_calls", on=(Place.MESSAGE,)),
    *_only(("",), _ENGINES, "reasoning_content", on=(Place.MESSAGE,)),
    *_only(("",), [VLLM], "reasoning", on=(Place.MESSAGE,)),
    *_only(([],), [SGLANG], "tools", on=(Place.MESSAGE,)),
    *_only((), _ALL, "tool_call_id", on=(Place.MESSAGE,)),
)  # fmt: skip

ROWS: dict[Place, dict[str, Row]] = {place: {row.name: row for row in TABLE if place in row.places} for place in Place}
