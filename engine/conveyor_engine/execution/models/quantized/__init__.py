"""Quantized checkpoints: reads the formats that are known, and rejects all others, declared or not."""
