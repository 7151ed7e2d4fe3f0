"""The limits of a client's grammar, and the messages for what exceeds them."""

from typing import Final

COMPILE_CPU_SECONDS: Final = 1.0  # a compilation and the first mask; the slowest schema of ADR 85 takes 28 ms
COMPILE_BYTES: Final = 64 * 2**20  # memory that a compilation may take; 128 tools or 1,024 choices take 5 MiB
MASK_CPU_SECONDS: Final = 0.2  # one mask
MASKS_CPU_SECONDS: Final = 0.02  # a mask on average, after the first `MASK_CPU_SECONDS`
STUCK_SECONDS: Final = 10.0  # a walker that takes so long for one mask is killed
WALKER_STACK_BYTES: Final = 64 * 2**20
TRIAL_STACK_BYTES: Final = 48 * 2**20  # a quarter less, so that the walker's stack is enough for what passed
WALKER_BYTES: Final = 512 * 2**20  # memory of the walker for all grammars and answers
CACHED: Final = 64  # compiled grammars
CACHED_BYTES: Final = 128 * 2**20  # memory of all compiled grammars

TOO_COSTLY_TO_COMPILE: Final = (
    f"it takes more than {COMPILE_CPU_SECONDS:g} s of processor time or {COMPILE_BYTES >> 20} MiB of memory to compile;"
    " simplify it"
)
# In place of the library's message, which is about the engine's own grammar.
TOO_LARGE: Final = "its grammar exceeds the engine's limits; simplify the schema or the grammar"
TOO_COSTLY_TO_FOLLOW: Final = (
    "the answer's structured output takes too much processor time to follow: more than "
    f"{MASK_CPU_SECONDS * 1e3:g} ms for one token, or {MASKS_CPU_SECONDS * 1e3:g} ms for each token on average; "
    "simplify the schema or the grammar"
)
