"""From the bytes of a file to the sound that a model reads, within bounds. For workers and runners."""
