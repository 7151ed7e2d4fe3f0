"""Triton's version of `native.states`: token mixers that keep a state for each row. Used by `models.state_mixers`."""

from conveyor_engine.execution.kernels.gated_delta import delta_rule
from conveyor_engine.execution.kernels.gated_norm import gated_norm
from conveyor_engine.execution.kernels.mamba2 import mamba2
from conveyor_engine.execution.kernels.state_conv import conv

__all__ = ["conv", "delta_rule", "gated_norm", "mamba2"]
