"""Writes down what is said in audio files, window by window."""
