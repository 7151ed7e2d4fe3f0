"""Renders pairs of texts with the model's chat template, for causal models that rank. Runs in worker processes.

Prompts equal those of sentence-transformers. If a prompt is truncated, the end of the template stays, because the model
answers after it.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from conveyor_engine.errors import InvalidRequest, context_exceeded
from conveyor_engine.serving.preparing.comparing import Comparison
from conveyor_engine.serving.preparing.jobs import ServedModel
from conveyor_engine.serving.preparing.prompts import Prompt, check_input
from conveyor_engine.text.chat_template import Rendering
from conveyor_engine.text.tokenizer import Truncation
from conveyor_engine.wire.classification import PairTemplate
from conveyor_engine.wire.request import ModelFacts

_PARTS: Final = (
    4  # a truncated prompt is rendered from texts of up to the context's length, and the template's own text
)
_FILLERS: Final = ("0", "1 2 3 4")


class PairRenderer:
    """Renders the pairs of one request."""

    def __init__(
        self, model: ServedModel, facts: ModelFacts, template: PairTemplate, comparison: Comparison,
        truncation: Truncation | None,
    ) -> None:  # fmt: skip
        """Raises InvalidRequest if the pairs cannot be truncated as requested."""
        self._tokenizer, self._facts, self._template = model.tokenizer, facts, template
        self._comparison, self._truncation = comparison, truncation
        self._rendering = Rendering(add_generation_prompt=template.add_generation_prompt)
        self._end = [] if truncation is None else self._find_end(truncation)

    def render(self, pairs: Sequence[tuple[str, str]]) -> Iterator[Prompt]:
        """Yield the prompt of each pair. Raises InvalidRequest for a pair that is too long."""
        shared, query = None, ""
        for number, (first, second) in enumerate(pairs):
            if first is not shared:
                shared, query = first, self._shorten(first, self._comparison.params[0], None)
            param = self._comparison.params[1].format(number)
            document = self._shorten(second, param, self._comparison.max_second_tokens)
            token_ids = self._fit(self._encode(query, document, param))
            check_input(token_ids, self._facts, param)
            yield Prompt(token_ids)

    def _shorten(self, text: str, param: str, most: int | None) -> str:
        """Return the beginning of the text that can be in the prompt. Raises InvalidRequest if it is too long."""
        longest = self._facts.max_model_len
        if self._truncation is not None or (most is not None and most < longest):
            return self._tokenizer.cut(text, longest if most is None else min(most, longest))
        if len(self._tokenizer.encode(text, longest, add_special_tokens=False, param=param)) > longest:
            raise context_exceeded(longest, f"{param} alone is longer. Or send truncate_prompt_tokens.", param=param)
        return text

    def _encode(self, query: str, document: str, param: str) -> list[int]:
        messages = self._template.list_messages(query, document, self._comparison.instruction)
        longest = _PARTS * self._facts.max_model_len
        try:
            text = self._tokenizer.render_chat(messages, longest, self._template.variables, self._rendering)
        except InvalidRequest as error:
            raise InvalidRequest(str(error), param=param, code=error.code) from None
        return self._tokenizer.encode(text, longest, add_special_tokens=False, param=param)

    def _fit(self, token_ids: list[int]) -> list[int]:
        if self._truncation is None or len(token_ids) <= self._truncation.max_tokens:
            return token_ids
        return token_ids[: self._truncation.max_tokens - len(self._end)] + self._end

    def _find_end(self, truncation: Truncation) -> list[int]:
        """Return the tokens with which all prompts end. Raises InvalidRequest if they leave no room."""
        if truncation.side == "left":
            message = "the model reads instructions in front of the texts, so only the end of a text can be cut"
            raise InvalidRequest(message, param=self._comparison.side_field)
        one, other = (self._encode(filler, filler, self._comparison.params[1]) for filler in _FILLERS)
        number = next((n for n, pair in enumerate(zip(one[::-1], other[::-1], strict=False)) if pair[0] != pair[1]), 0)
        if number >= truncation.max_tokens:
            message = f"the model's chat template ends with {number} tokens, more than the limit of"
            raise InvalidRequest(f"{message} {truncation.max_tokens}", param="truncate_prompt_tokens")
        return one[len(one) - number :]
