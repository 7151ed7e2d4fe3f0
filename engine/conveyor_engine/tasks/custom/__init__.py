"""Runs models that their owner brings, in one step: a program of torch.export, or a Python class."""
