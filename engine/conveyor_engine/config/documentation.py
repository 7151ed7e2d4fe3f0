"""The engine's part of docs/configuration.md, written from EngineConfig; called by `docs/configuration.py`. Pure."""

from dataclasses import MISSING

from conveyor_engine.config.engine_config import RANGES
from conveyor_engine.config.sources import ENVIRONMENT_PREFIX, Setting, settings

_HEAD = f"""## Engine
`python -m conveyor_engine serve`. The operator writes the file from the InferenceService; by hand the engine takes each
field from, strongest first, a flag (`--max-num-seqs 8`), the environment (`{ENVIRONMENT_PREFIX}MAX_NUM_SEQS=8`), a flat
YAML file given with `--config` (`max_num_seqs: 8`), and the defaults below. An unknown key is an error.

| field | type | default | meaning |
| --- | --- | --- | --- |
"""


def configuration_section() -> str:
    """The section's text, ending in a newline."""
    return _HEAD + "".join(f"{_row(setting)}\n" for setting in settings())


def _row(setting: Setting) -> str:
    kind = " \\| ".join(f"`{choice}`" for choice in setting.choices) or setting.kind.__name__
    if setting.name in RANGES:
        low, high = RANGES[setting.name]
        kind += f", {low:g}.." + ("" if high == float("inf") else f"{high:,.0f}".replace(",", " "))
    return f"| `{setting.name}` | {kind} | {_default(setting)} | {setting.doc} |"


def _default(setting: Setting) -> str:
    if setting.default is MISSING:
        return "required"
    if setting.default is None:
        return "–"
    return f"`{str(setting.default).lower() if setting.kind is bool else setting.default}`"
