"""Grammars of clients, compiled and followed in processes of their own. No other process executes what a client wrote.

`client`, `answers`, `verdicts` and `supervisor` run in the engine process. `process` forks `trial` for each new
grammar, and `walker`, which follows all answers. Does not import torch.
"""
