"""What each task allows. The rules of the API, the engine's checks, advice and the API reference read this table."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

Mode = Literal["None", "Static", "Dynamic", "Continuous"]
MODES: Final[tuple[Mode, ...]] = ("None", "Static", "Dynamic", "Continuous")
CLOSED_MODES: Final[tuple[Mode, ...]] = ("None", "Static", "Dynamic")


@dataclass(frozen=True, slots=True)
class Allows:
    """What the requests of a task are like, and so which settings apply to it.

    The defaults are those of a task whose requests take one step and have text tokens.
    """

    modes: tuple[Mode, ...] = MODES
    one_step: bool = True  # a request takes one step; otherwise others join and leave between its steps
    workload: bool = True  # requests have lengths in text tokens
    max_model_len: bool = True  # the longest request can be set
    kv_cache: bool = False  # requests keep keys and values between steps
    adapters: bool = False  # LoRA adapters beside the model
    divides: bool = False  # several devices can compute one model
    rounds: bool = False  # weights can be rounded to fewer bits when they are loaded
    speculation: bool = False  # the next tokens of answers can be drafted
    objectives: bool = True  # latencies by which engines adapt their limits
    padding: bool = False  # batches can be padded to their longest prompt
    attention: bool = True  # the engine's own attention replaces the model's

    @property
    def default_mode(self) -> Mode:
        return "Dynamic" if self.one_step else "Continuous"


ONE_STEP_OF_TEXT: Final = Allows()
# Engines try tasks from the last row to the first, so a model that only the first recognises generates text.
TASKS: Final[dict[str, Allows]] = {
    "Generate": Allows(
        one_step=False, kv_cache=True, adapters=True, divides=True, rounds=True, speculation=True, padding=True
    ),
    "Embed": ONE_STEP_OF_TEXT,
    "Classify": ONE_STEP_OF_TEXT,
    "Rerank": ONE_STEP_OF_TEXT,
    "Transcribe": Allows(one_step=False, workload=False, max_model_len=False, kv_cache=True, objectives=False),
    "ImageClassify": Allows(modes=CLOSED_MODES, workload=False, max_model_len=False, attention=False),
    "ImageGenerate": Allows(one_step=False, workload=False, max_model_len=False, objectives=False, attention=False),
    "Custom": Allows(modes=CLOSED_MODES, workload=False, attention=False),
}


def list_tasks(has: Callable[[Allows], bool]) -> tuple[str, ...]:
    """Return the names of the tasks for which `has` is true."""
    return tuple(name for name, allows in TASKS.items() if has(allows))
