"""Triton's version of `native.states`: token mixers that keep a state for each row. Used by `models.state_mixers`."""

from conveyor_engine.execution.kernels.state_conv import conv

__all__ = ["conv"]
