"""From the bytes of a file to the numbers that a model reads, within bounds. For workers and runners."""
