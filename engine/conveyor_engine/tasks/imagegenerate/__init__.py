"""Generates pictures from prompts. Each engine step is one denoising step."""
