"""Continues prompts, token by token."""
