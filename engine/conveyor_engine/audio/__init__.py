"""Decodes audio files into the features that a model reads, within limits. For workers and runners."""
