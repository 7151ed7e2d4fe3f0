"""Computes the pictures of prompts: features by the model's encoder, and the positions of tokens around pictures.

The runner calls it for the eager steps that compute tokens of pictures. transformers' classes for images and
texts take an encoder's output in place of pixels (`mm_encoder_outputs`), so the model itself puts features where they
belong. Features are kept by content, within a number of bytes, so that a picture is encoded once for all its chunks and
requests.
"""

import inspect
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from conveyor_engine.execution.attention.backend import Ends
from conveyor_engine.execution.attention.interface import use_transformers_attention
from conveyor_engine.execution.batch import Layout
from conveyor_engine.execution.models.patches import replace_convolutions
from conveyor_engine.execution.models.towers import Tower, put_back, take_towers
from conveyor_engine.wire.pictures import Picture, PlacedPicture, decode_pictures
from conveyor_engine.wire.step import AdmittedRow

KEPT_BYTES: Final = 256 * 2**20  # of features
_GRID: Final = "image_grid_thw"  # the encoder's input that positions depend on


class Ahead(Enum):
    """The layers in which a token of an image sees the later tokens of the image."""

    NOWHERE = auto()
    IN_WINDOWS = auto()  # layers with a window
    EVERYWHERE = auto()


Features = tuple[torch.Tensor, ...]  # of one picture, each (places, hidden): the embeddings, and those of deeper layers


class Seen(NamedTuple):
    """What a step's forward needs beside its tokens."""

    position_ids: torch.Tensor  # int64 (1, T) or (3, 1, T)
    outputs: dict[str, Any]  # an encoder's output, by the name of its kind; empty if the step has no token of a picture
    ends: Ends | None  # set if tokens see later ones

    def arguments(self) -> dict[str, Any]:
        """Return the model's arguments."""
        return {"position_ids": self.position_ids} | ({"mm_encoder_outputs": self.outputs} if self.outputs else {})


@dataclass(frozen=True, slots=True)
class _Row:
    """The pictures of a row, and the places of their features in its prompt."""

    payload: bytes  # what the pictures were decoded from
    pictures: list[PlacedPicture]
    places: npt.NDArray[np.int64]  # positions of all placeholders, ascending
    positions: npt.NDArray[np.int64]  # (3, prompt): of each token, for the model's rotary embedding
    shift: int  # what is added to the position of a later token
    ends: npt.NDArray[np.int32]  # (prompt,): where the keys end that a token sees; of a placeholder, after its image

    @property
    def end(self) -> int:
        """Return the position after the last placeholder. From here on, positions are only shifted."""
        return int(self.places[-1]) + 1


class Sight:
    """The encoders of one model, and the pictures of its rows."""

    def __init__(
        self, model: PreTrainedModel, towers: list[Tower], place_id: int, kept_bytes: int = KEPT_BYTES
    ) -> None:
        """Put the encoders into the model. place_id: the token whose embedding a feature replaces."""
        put_back(model, towers)
        for tower in towers:
            replace_convolutions(tower.part)
        self.model, self._base, self._towers = model, model.base_model, towers
        self.forward_inputs = inspect.signature(model.forward).parameters
        self.place_id, self._kept_bytes = place_id, kept_bytes
        self._inputs = inspect.signature(self._base.get_image_features).parameters
        self.has_axes = hasattr(self._base, "get_rope_index")  # whether positions have three axes
        self.ahead = Ahead.NOWHERE  # set by `sight_trial`
        self.plain_id = place_id  # the token whose embedding a placeholder of no picture has; set by `sight_trial`
        self._rows: dict[int, _Row] = {}
        self._features: OrderedDict[bytes, Features] = OrderedDict()
        self._num_bytes = 0
        self._kind: type = list  # of what the encoder returns
        self.step_bytes = 0  # of the encoder, beside the weights; set by `tasks.generate`
        self.is_deep = False  # whether features of a picture are added behind the first layers too

    @property
    def sees_ahead(self) -> bool:
        """Return whether tokens of an image see later ones."""
        return self.ahead is not Ahead.NOWHERE

    def use_own_attention(self) -> None:
        """Let the encoders use transformers' attention, also after the model was switched to ours."""
        for tower in self._towers:
            use_transformers_attention(tower.part)

    def close(self) -> None:
        """Take the encoders out of the model until `open`, and forget all pictures."""
        take_towers(self.model)
        self.forget()

    def open(self) -> None:
        """Put the encoders back."""
        put_back(self.model, self._towers)

    def forget(self) -> None:
        """Forget all pictures."""
        self._rows.clear()
        self._features.clear()
        self._num_bytes = 0

    def admit(self, admitted: AdmittedRow) -> int:
        """Note the pictures of a row, in place of those that it had. Returns the shift of later positions."""
        self._rows.pop(admitted.row, None)
        if not admitted.payload:
            return 0
        pictures = self._decode(admitted.payload)
        assert admitted.sampling is not None
        prompt = np.array(admitted.token_ids[: admitted.sampling.num_prompt_tokens], dtype=np.int64)
        places = np.flatnonzero(prompt == self.place_id)
        assert len(places) == sum(each.picture.num_places for each in pictures), "a worker checks the placeholders"
        positions, shift = self._find_positions(prompt, pictures)
        self._rows[admitted.row] = _Row(
            admitted.payload, pictures, places, positions, shift, _find_ends(len(prompt), places)
        )
        return shift

    def _decode(self, payload: bytes) -> list[PlacedPicture]:
        """Return the pictures of a payload. Choices of one prompt share them."""
        same = (row.pictures for row in self._rows.values() if row.payload == payload)
        return next(same, None) or decode_pictures(payload)

    def _find_positions(
        self, prompt: npt.NDArray[np.int64], pictures: Sequence[PlacedPicture]
    ) -> tuple[npt.NDArray[np.int64], int]:
        if not self.has_axes:
            return np.broadcast_to(np.arange(len(prompt)), (3, len(prompt))), 0
        tokens = torch.from_numpy(prompt)[None]
        grids = torch.cat([unpack(each.picture, _GRID) for each in pictures])
        types = (tokens == self.place_id).int()
        positions, shift = self._base.get_rope_index(tokens, mm_token_type_ids=types, image_grid_thw=grids)
        return positions[:, 0].numpy(), int(shift)

    def is_in(self, rows: Sequence[int], num_computed_tokens: Sequence[int]) -> bool:
        """Return whether a step that computes these rows from these tokens on needs `see`."""
        is_in = False
        for row, computed in zip(rows, num_computed_tokens, strict=True) if self._rows else ():
            if (found := self._rows.get(row)) is None:
                continue
            if computed < found.end:
                is_in = True
            elif found.pictures:  # they are not needed again: a row that begins again is admitted with them
                self._rows[row] = replace(found, payload=b"", pictures=[])
        return is_in

    def see(self, layout: Layout, input_ids: torch.Tensor) -> Seen:
        """Compute what the forward of input_ids (1, T) needs. Encodes pictures whose features are not kept."""
        device = input_ids.device
        position_ids = torch.from_numpy(self._lay_positions(layout))[:, None].to(device)
        if not self.has_axes:
            position_ids = position_ids[0]
        parts = list(self._find_parts(layout))
        if not parts:
            return Seen(position_ids, {}, None)
        features = self._find_features([placed for _, placed, _ in parts])
        indices = torch.from_numpy(np.concatenate([where for where, _, _ in parts])).to(device)
        chosen = [tuple(part[inside] for part in features[placed.span.digest]) for _, placed, inside in parts]
        ends = self._lay_ends(layout, device) if self.sees_ahead else None
        return Seen(position_ids, {"image": self._lay_out(input_ids, indices, chosen)}, ends)

    def _lay_ends(self, layout: Layout, device: torch.device) -> Ends:
        """Return where the keys end that each of a step's tokens sees."""
        ends = (layout.positions + 1).astype(np.int32)
        for index, row in enumerate(layout.rows.tolist()):
            if (found := self._rows.get(row)) is not None:
                begin, end = layout.starts[index], layout.starts[index + 1]
                own = layout.positions[begin:end]
                is_prompt = own < len(found.ends)
                ends[begin:end][is_prompt] = found.ends[own[is_prompt]]
        return Ends(torch.from_numpy(ends).to(device), in_full_layers=self.ahead is Ahead.EVERYWHERE)

    def _lay_positions(self, layout: Layout) -> npt.NDArray[np.int64]:
        """Return the positions (3, T) of a step's tokens."""
        positions = np.repeat(layout.positions[None], 3, axis=0)
        for index, row in enumerate(layout.rows.tolist()):
            if (found := self._rows.get(row)) is not None:
                begin, end = layout.starts[index], layout.starts[index + 1]
                own = layout.positions[begin:end]
                prompt = found.positions.shape[1]
                positions[:, begin:end] += found.shift
                is_prompt = own < prompt
                positions[:, begin:end][:, is_prompt] = found.positions[:, own[is_prompt]]
        return positions

    def _find_parts(self, layout: Layout) -> Iterator[tuple[npt.NDArray[np.int64], PlacedPicture, slice]]:
        """Yield, for each picture of the step: indices into the step's tokens, the picture, and which of its
        features."""
        for index, row in enumerate(layout.rows.tolist()):
            if (found := self._rows.get(row)) is None:
                continue
            begin, end = int(layout.starts[index]), int(layout.starts[index + 1])
            first = int(layout.positions[begin])
            offset = 0
            for placed in found.pictures:
                places = found.places[offset : offset + placed.picture.num_places]
                offset += placed.picture.num_places
                low, high = np.searchsorted(places, (first, first + end - begin))
                if low < high:
                    yield places[low:high] - first + begin, placed, slice(int(low), int(high))

    def _find_features(self, wanted: Sequence[PlacedPicture]) -> dict[bytes, Features]:
        """Return the features of these pictures by digest. Encodes those that are not kept."""
        found: dict[bytes, Features] = {}
        for placed in wanted:
            digest = placed.span.digest
            if digest in found:
                continue
            kept = self._features.get(digest)
            if kept is not None:
                self._features.move_to_end(digest)
            found[digest] = kept or self.keep(digest, self.encode(placed.picture))
        return found

    def has_kept(self, digest: bytes) -> bool:
        """Return whether the features of this picture are kept. They are then dropped after those of all others."""
        if digest not in self._features:
            return False
        self._features.move_to_end(digest)
        return True

    def has_room(self, num_places: int, held: Iterable[bytes]) -> bool:
        """Return whether features of so many places can be kept beside those of the held pictures, if any are kept."""
        kept = [features for digest in held if (features := self._features.get(digest))]
        num_bytes = sum(map(_count_bytes, kept))
        num_kept_places = sum(len(features[0]) for features in kept)  # all places have equally many bytes
        return not kept or num_bytes * (num_kept_places + num_places) <= self._kept_bytes * num_kept_places

    def keep(self, digest: bytes, features: Features) -> Features:
        """Keep the features, and drop the least recently used ones that exceed the bytes."""
        self._features[digest] = features
        self._num_bytes += _count_bytes(features)
        while self._num_bytes > self._kept_bytes and len(self._features) > 1:
            _, dropped = self._features.popitem(last=False)
            self._num_bytes -= _count_bytes(dropped)
        return features

    def encode(self, picture: Picture) -> Features:
        """Compute the features of a picture."""
        device, dtype = self.model.device, self.model.dtype
        inputs: dict[str, Any] = {}
        for name in picture.tensors:
            if name in self._inputs:
                tensor = unpack(picture, name).to(device)
                inputs[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
        output = self._base.get_image_features(**inputs, return_dict=True)
        self._kind = type(output.pooler_output)
        features = tuple(_join(part) for part in (output.pooler_output, *(output.get("deepstack_features") or ())))
        self.is_deep = len(features) > 1
        return features

    def _lay_out(self, input_ids: torch.Tensor, indices: torch.Tensor, chosen: Sequence[Features]) -> Any:
        """Return an encoder's output with a feature for each placeholder among the step's tokens.

        A token that only looks like a placeholder, because a text has it or a model sampled it, has the embedding that
        it has in a step without pictures.
        """
        all_places = torch.nonzero(input_ids[0] == self.place_id)[:, 0]
        embed = self.model.get_input_embeddings()
        main, *deeper = (torch.cat(parts) for parts in zip(*chosen, strict=True))
        features = embed(torch.full_like(all_places, self.plain_id)).to(main.dtype)
        where = torch.searchsorted(all_places, indices)
        features[where] = main
        output = BaseModelOutputWithPooling(pooler_output=features if self._kind is torch.Tensor else (features,))
        if deeper:
            layers = [torch.zeros_like(features).index_copy(0, where, part) for part in deeper]
            output["deepstack_features"] = [(layer,) for layer in layers]
        return output


def unpack(picture: Picture, name: str) -> torch.Tensor:
    packed = picture.tensors[name]
    array = np.frombuffer(packed.data, dtype=packed.dtype).reshape(packed.shape)
    return torch.from_numpy(array.copy())


def _find_ends(length: int, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """Return where the keys end that each of so many tokens sees: after it, or after its run of placeholders."""
    ends = np.arange(1, length + 1, dtype=np.int32)
    lasts = np.append(np.flatnonzero(np.diff(places) > 1), len(places) - 1)  # of runs, as indices into `places`
    ends[places] = np.repeat(places[lasts] + 1, np.diff(lasts, prepend=-1))
    return ends


def _join(part: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """Return features (places, hidden) from what an encoder returns for one picture."""
    joined = part if isinstance(part, torch.Tensor) else torch.cat(list(part))
    return joined.reshape(-1, joined.shape[-1])


def _count_bytes(features: Features) -> int:
    return sum(part.numel() * part.element_size() for part in features)
