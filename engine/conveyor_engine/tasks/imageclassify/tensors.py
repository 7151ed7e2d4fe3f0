"""The inputs and outputs of a model that classifies images, in the Open Inference Protocol.

A client sends either encoded pictures or the pixels that the model's image processor makes from them. In JSON, elements
of the datatype BYTES are texts, so a picture in JSON is in base64.
"""

from array import array
from typing import Final

from conveyor_engine.wire.classification import read_logits
from conveyor_engine.wire.images import ImageFacts
from conveyor_engine.wire.request import ModelFacts
from conveyor_engine.wire.tensors import Signature, Tensor, Tensors, TensorSpec, encode_elements

IMAGE: Final = "image"
PIXELS: Final = "pixel_values"
_LOGITS: Final = "logits"
_LABEL: Final = "label"


def read_signature(facts: ModelFacts) -> Signature:
    """Return the signature. An item has one of the two inputs."""
    of_task = ImageFacts.read(facts)
    inputs = TensorSpec(IMAGE, "BYTES", is_optional=True), TensorSpec(PIXELS, "FP32", of_task.shape, is_optional=True)
    outputs = TensorSpec(_LOGITS, "FP32", (len(of_task.labels),)), TensorSpec(_LABEL, "BYTES")
    return Signature(inputs, outputs)


def read_outputs(facts: ModelFacts, payload: bytes) -> Tensors:
    """Return the outputs of an item from its payload: the logit of each label, and the label with the largest logit."""
    labels, logits = ImageFacts.read(facts).labels, read_logits(payload)
    best = labels[max(range(len(labels)), key=logits.__getitem__)]
    return {
        _LOGITS: Tensor("FP32", (len(labels),), array("f", logits).tobytes()),
        _LABEL: Tensor("BYTES", (), encode_elements([best.encode()])),
    }
