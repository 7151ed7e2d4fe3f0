"""How long the bodies with files may be that are longer than any other. Read by gateway and engine."""

from typing import Final

AUDIO_BYTES_MAX: Final = 26 * 2**20  # OpenAI's 25 MiB for a file, and the rest of its form
