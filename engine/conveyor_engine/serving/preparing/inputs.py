"""Reads the inputs of bodies that request a vector or a label for each input, or for one conversation. Used by tasks.

The fields have vLLM's names and meanings. The chat template turns a conversation into one text.
"""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PlainValidator, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from conveyor_engine.errors import InvalidRequest
from conveyor_engine.serving.preparing.chat_schemas import ChatRequest, Messages
from conveyor_engine.serving.preparing.conversations import read_conversation
from conveyor_engine.serving.preparing.jobs import ServedModel, check_num_inputs, name_input
from conveyor_engine.serving.preparing.prompts import check_input, read_input
from conveyor_engine.serving.preparing.schemas import PromptFields
from conveyor_engine.serving.preparing.values import INPUTS_SCHEMA, parse_inputs
from conveyor_engine.text.tokenizer import Truncation
from conveyor_engine.wire.worker import Job


def _parse_inputs(value: object) -> list[Any]:
    """Return the inputs as `parse_inputs` does; an empty list for null."""
    return [] if value is None else parse_inputs(value)


class InputFields(PromptFields):
    """The fields `input` and `messages`, and those that say how they become tokens."""

    truncates = "right"
    chat_fields: ClassVar[tuple[str, ...]] = ("messages", "continue_final_message", "chat_template_kwargs")

    input: Annotated[
        list[str] | list[list[int]],
        PlainValidator(_parse_inputs),
        WithJsonSchema({"anyOf": [*INPUTS_SCHEMA["anyOf"], {"type": "null"}]}),
    ] = Field(default_factory=list)
    """A text, token ids, or a list of either. Each entry of such a list is a separate input. No text may be empty."""
    messages: Messages | None = None
    """In place of `input`: a conversation, which the model's chat template turns into one text."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its special tokens; default: true for `input`, false for `messages`."""
    add_generation_prompt: bool | None = False
    """For messages. True: the text ends with the beginning of an assistant's turn."""
    continue_final_message: bool | None = False
    """For messages. True: the text ends where the last message does."""
    chat_template_kwargs: dict[str, Any] | None = None
    """For messages: variables for the chat template."""
    padding: Literal["do_not_pad", "max_length"] | None = None
    """`max_length`: pad each prompt to the model's context length. The model reads the padding tokens too."""

    @model_validator(mode="after")
    def _check_inputs(self) -> Self:
        if bool(self.input) == (self.messages is not None):
            raise PydanticCustomError("input", "send exactly one of input and messages")
        if self.add_generation_prompt and self.continue_final_message:
            raise PydanticCustomError(
                "add_generation_prompt",
                "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",  # vLLM's message
            )
        return self

    @property
    def inputs_field(self) -> str:
        """The name of the field that has the inputs."""
        return "input" if self.messages is None else "messages"

    def num_inputs(self) -> int:
        """Return the number of inputs. A conversation is one input."""
        return len(self.input) if self.messages is None else 1

    def chat(self) -> ChatRequest:
        """Return the messages as a chat request, so that the same code renders them."""
        shown = {name: getattr(self, name) for name in self.chat_fields}
        return ChatRequest.model_construct(None, add_generation_prompt=bool(self.add_generation_prompt), **shown)


def read_inputs(model: ServedModel, job: Job, fields: InputFields, begin: str = "") -> list[list[int]]:
    """Return the token ids of each input. `begin` is put in front of each text. Raises InvalidRequest."""
    check_num_inputs(fields.num_inputs(), fields.inputs_field)
    truncation = fields.truncation(job.facts.max_model_len)
    if fields.messages is None:
        prompts = [_read(model, job, fields, index, begin, truncation) for index in range(len(fields.input))]
    else:
        adds = bool(fields.add_special_tokens)
        prompts = [read_conversation(model, fields.chat(), job.facts, truncation, add_special_tokens=adds).token_ids]
        check_input(prompts[0], job.facts, "messages")
    if fields.padding == "max_length":
        padding_id = _find_padding_id(model)
        prompts = [prompt + [padding_id] * (job.facts.max_model_len - len(prompt)) for prompt in prompts]
    return prompts


def _read(
    model: ServedModel, job: Job, fields: InputFields, index: int, begin: str, truncation: Truncation | None
) -> list[int]:
    given = fields.input[index]  # a text or token ids; ids are not copied
    whole = begin + given if isinstance(given, str) else given
    param = name_input("input", index, len(fields.input))
    adds = fields.add_special_tokens is not False
    return read_input(model, whole, truncation, job.facts, param, add_special_tokens=adds)


def needs_inputs(schema: dict[str, Any]) -> None:
    """Add to a JSON Schema the rules that pydantic cannot derive.

    A body has either `input` or `messages`. `add_generation_prompt` and `continue_final_message` exclude each other.
    """
    given = [("input", ["string", "array"]), ("messages", ["array"])]
    schema["oneOf"] = [{"properties": {name: {"type": kinds}}, "required": [name]} for name, kinds in given]
    begins = {"add_generation_prompt": {"const": True}, "continue_final_message": {"const": True}}
    schema["not"] = {"properties": begins, "required": list(begins)}


def _find_padding_id(model: ServedModel) -> int:
    padding_id = model.tokenizer.padding_id
    if padding_id is None:
        message = "padding is max_length, and this model's tokenizer_config.json names no pad_token; leave it out"
        raise InvalidRequest(message, param="padding")
    return padding_id
