"""Transcribes the speech in audio files, window by window."""
