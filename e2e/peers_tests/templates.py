"""A model with another chat template. Used by `plugin`; imports nothing of either side."""

import os
import shutil
from pathlib import Path


def with_template(model: Path, template: str, directory: Path) -> Path:
    """A copy of the model that has another chat template; its weights are the same files."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    for file in model.iterdir():
        if file.name != "chat_template.jinja":
            (directory / file.name).symlink_to(os.path.relpath(file.resolve(), directory))
    (directory / "chat_template.jinja").write_text(template)
    return directory
