"""Tries a model's weight headers, tokenizer and chat template in a process with limits. Called by `__main__`.

The model's author wrote these files, so they may be hostile. After a successful trial the engine reads the same files
again without limits, at the same cost.
"""

from pathlib import Path
from typing import Final

from conveyor_engine.limited import run_limited
from conveyor_engine.model_files import check_files
from conveyor_engine.text.tokenizer import Tokenizer, read_chat_template

TOKENIZER_CPU_SECONDS: Final = 60.0  # a vocabulary of 256,000 tokens takes about 1 s
TEMPLATE_CPU_SECONDS: Final = 5.0  # the longest templates take 0.1 s


def try_files(directory: Path, reads_text: bool) -> None:
    """Raise ModelError if a file in the model directory is invalid or exceeds a limit."""
    if directory.is_dir():  # otherwise the tokenizer reports the error
        check_files(directory)
    if directory.is_dir() and reads_text:
        run_limited(f"{directory / 'tokenizer.json'}", lambda: Tokenizer(directory), TOKENIZER_CPU_SECONDS)
        run_limited("the model's chat template", lambda: _compile(directory), TEMPLATE_CPU_SECONDS)


def _compile(directory: Path) -> None:
    template = read_chat_template(directory)
    if template is not None:
        template.compile()
