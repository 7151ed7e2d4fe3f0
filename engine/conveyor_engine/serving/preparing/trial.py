"""Reads a tenant's headers of weights, tokenizer and template within limits. Called by `__main__`.

A tokenizer and a chat template are the work of the model's author. After a trial the same files are read again without
limits, at the same cost.
"""

from pathlib import Path
from typing import Final

from conveyor_engine.limited import run_limited
from conveyor_engine.model_files import check_files
from conveyor_engine.text.tokenizer import Tokenizer, read_chat_template

TOKENIZER_CPU_SECONDS: Final = 60.0  # a vocabulary of 256,000 takes about one
TEMPLATE_CPU_SECONDS: Final = 5.0  # the longest take a tenth of one


def try_files(directory: Path, reads_text: bool) -> None:
    """Raises the ModelError of reading one of them, or one that names a limit."""
    if directory.is_dir():  # the tokenizer says what else it is
        check_files(directory)
    if directory.is_dir() and reads_text:
        run_limited(f"{directory / 'tokenizer.json'}", lambda: Tokenizer(directory), TOKENIZER_CPU_SECONDS)
        run_limited("the model's chat template", lambda: _compile(directory), TEMPLATE_CPU_SECONDS)


def _compile(directory: Path) -> None:
    template = read_chat_template(directory)
    if template is not None:
        template.compile()
