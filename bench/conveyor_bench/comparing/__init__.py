"""Compares systems that run in turns in one process, and this engine with the machine's limit."""
