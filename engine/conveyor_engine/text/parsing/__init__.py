"""Divides a model's output into the fields of a message: text, thinking and tool calls."""
