"""The sequences of a step for kernels that keep a state for each row. Filled in by `models.mixers`."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class StateRows:
    """The sequences of a step: decodes with at most one token each, then prompts. Their tokens lie side by side.

    The host may not know their lengths, as in a CUDA graph. A sequence without tokens keeps its state.
    """

    query_start: torch.Tensor  # int32 (n + 1,)
    rows: torch.Tensor  # int64 (n,), where the states of each sequence are
    is_new: torch.Tensor  # bool (n,), whether a sequence begins with zeros
    num_decodes: int
    most_prompt_tokens: int  # not less than the tokens of all prompts
    num_tokens: int  # not more than the tokens of all sequences; results of tokens after them are zeros

    @property
    def num_prompts(self) -> int:
        return len(self.rows) - self.num_decodes

    def make_results(self, x: torch.Tensor, *shape: int) -> torch.Tensor:
        """Return an empty tensor (T, *shape) of the type of x (T, ...), with zeros for tokens of no sequence."""
        make = x.new_empty if self.num_tokens == len(x) else x.new_zeros
        return make((len(x), *shape))
