"""Copies a model with another chat template or config.json. Used by `plugin` and `models`; imports neither program."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def with_changes(
    model: Path, directory: Path, template: str | None = None, config: Mapping[str, Any] | None = None
) -> Path:
    """Copy the model with another chat template, and with these fields in its config.json. Returns the folder.

    The copy's weights are links to the same files.
    """
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    texts: dict[str, str] = {}
    if template is not None:
        texts["chat_template.jinja"] = template
    if config:
        texts["config.json"] = json.dumps(json.loads((model / "config.json").read_text()) | dict(config))
    for file in model.iterdir():
        if file.name not in texts:
            (directory / file.name).symlink_to(os.path.relpath(file.resolve(), directory))
    for name, text in texts.items():
        (directory / name).write_text(text)
    return directory
