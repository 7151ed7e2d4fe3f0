"""Predicts nano-vllm's bench on a GPU that is absent, by a time model of every part of a step."""
