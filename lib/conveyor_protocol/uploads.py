"""Size limits for request bodies with files, which are higher than for other bodies. Read by gateway and engine."""

from typing import Final

AUDIO_BYTES_MAX: Final = 26 * 2**20  # OpenAI's 25 MiB for a file, and the rest of its form
