"""Decides which requests run in the next step, and on which KV blocks. Pure: no torch, no clock, no I/O."""
