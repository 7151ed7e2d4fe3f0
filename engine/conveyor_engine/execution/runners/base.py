"""Base class of all runners: what most of them have in common of the protocol `loop.executor`."""

from collections.abc import Sequence

import torch

from conveyor_engine.execution.placement import free_cached_memory


class Runner:
    """A model on one device."""

    device: torch.device

    @property
    def graph_sizes(self) -> Sequence[int]:
        """Return the numbers of rows for which decodes are captured. Empty: no graphs."""
        return ()

    @property
    def extra_warmup_tokens(self) -> Sequence[int]:
        """Return the tokens of extra warm-up steps."""
        return ()

    def free_memory(self) -> None:
        """Return cached memory to the device after a failed step. Raises if the device is broken."""
        free_cached_memory(self.device)
