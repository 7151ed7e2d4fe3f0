"""Writes the results of a run: two JSON files, one page that needs no network, and the pictures of the docs.

Used by `command`.
"""

import json
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

from conveyor_bench.modes import pictures
from conveyor_insight.svg import short

_STYLE = """:root{color-scheme:light dark}
body{font:16px/1.5 system-ui,sans-serif;max-width:820px;margin:2rem auto;padding:0 1rem;background:#fff;color:#1f2328}
svg{width:100%;height:auto;margin:.5rem 0 1.5rem}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:13px}
td,th{padding:.25rem .6rem;text-align:right;border-bottom:1px solid #d8dde3}
td:first-child,th:first-child,td:nth-child(2){text-align:left}
.method{color:#59636e;font-size:14px}
@media(prefers-color-scheme:dark){body{background:#0d1117;color:#e6edf3}td,th{border-color:#343b44}.method{color:#9198a1}}"""
_COLUMNS = {
    "output_tokens_per_second": "tokens/s",
    "ttft_p50": "TTFT P50, s",
    "ttft_p99": "TTFT P99, s",
    "latency_p50": "P50, s",
    "latency_p95": "P95, s",
    "latency_p99": "P99, s",
    "queue_p50": "queue P50, s",
    "padding_waste": "padding",
    "kv_waste": "KV waste",
    "kv_waste_if_reserved": "KV waste, reserved",
    "utilisation": "utilisation",
    "busy": "device busy",
    "flops_utilisation": "arithmetic used",
    "most_running": "most running",
}
_SHARES = ("padding_waste", "kv_waste", "kv_waste_if_reserved", "utilisation", "busy", "flops_utilisation")


def write_results(folder: Path, results: Mapping[str, Mapping[str, Any]]) -> None:
    """Write a JSON file for each source (`virtual`, `measured`) that has results, and `index.html`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, result in results.items():
        (folder / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    (folder / "index.html").write_text(build_page(results))


def read_results(folder: Path) -> dict[str, Any]:
    """Read the results that earlier runs have left in the folder."""
    files = {name: folder / f"{name}.json" for name in ("virtual", "measured")}
    return {name: json.loads(path.read_text()) for name, path in files.items() if path.exists()}


def write_pictures(folder: Path, results: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the pictures of docs/batching.md."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, result in results.items():
        for picture, svg in draw_all(name, result).items():
            (folder / f"{picture}.svg").write_text(svg + "\n")


def draw_all(name: str, result: Mapping[str, Any]) -> dict[str, str]:
    """Return every picture of one source, by file name."""
    where = result["where"]
    drawn = {
        "throughput": pictures.draw_throughput(result["modes"], where),
        "utilisation": pictures.draw_utilisation(result["modes"], where),
        "waste": pictures.draw_waste(result["modes"], where),
    }
    if latency := result.get("latency"):
        drawn |= {
            "latency": pictures.draw_latency(latency, "latency", "Time of a request", where),
            "ttft": pictures.draw_latency(latency, "ttft", "Time to first token", where),
            "queue": pictures.draw_latency(latency, "queue", "Wait in the queue", where),
        }
    if systems := result.get("systems"):
        drawn |= {"ratio": pictures.draw_ratio(systems), "limits": pictures.draw_limits(systems)}
    return {f"{name}-{picture}": svg for picture, svg in drawn.items()}


def build_page(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return one self-contained page."""
    body = "".join(part for name, result in results.items() for part in _sections(name, result))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Batching modes</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<style>{_STYLE}</style></head><body><h1>None, Static, Dynamic, Continuous</h1>"
        f"<p>Four policies of one scheduler. How to read these pictures: docs/batching.md.</p>{body}</body></html>\n"
    )


def _sections(name: str, result: Mapping[str, Any]) -> Iterator[str]:
    yield f"<h2>{'In virtual time' if name == 'virtual' else 'Measured'}</h2>"
    yield f'<p class="method">{escape(result["method"])}</p>'
    yield from draw_all(name, result).values()
    for system, each in (result.get("systems") or {result["where"]: result}).items():
        yield f"<h3>{escape(system)}</h3>"
        yield _table(each["modes"])
        yield _ratios(each)


def _table(modes: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    columns = [key for key in _COLUMNS if any(key in each for caps in modes.values() for each in caps.values())]
    head = "".join(f"<th>{_COLUMNS[key]}</th>" for key in columns)
    rows = "".join(
        f"<tr><td>{pictures.NAMES[mode]}</td><td>{cap}</td>{''.join(_cell(each, key) for key in columns)}</tr>"
        for mode, caps in modes.items()
        for cap, each in caps.items()
    )
    return f'<div class="wide"><table><tr><th>mode</th><th>outputs up to</th>{head}</tr>{rows}</table></div>'


def _cell(figures: Mapping[str, float], key: str) -> str:
    if key not in figures:
        return "<td></td>"
    return f"<td>{figures[key]:.1%}</td>" if key in _SHARES else f"<td>{short(figures[key])}</td>"


def _ratios(result: Mapping[str, Any]) -> str:
    parts = result["decomposition"]
    names = list(next(iter(parts.values())))
    head = "".join(f"<th>{name}</th>" for name in names)
    rows = "".join(
        f"<tr><td>{cap}</td>{''.join(f'<td>{parts[cap][name]:.2f}</td>' for name in names)}<td>{ratio:.2f}</td></tr>"
        for cap, ratio in result["ratios"].items()
    )
    head = f"<tr><th>outputs up to</th>{head}<th>Continuous over Static</th></tr>"
    return f'<div class="wide"><table>{head}{rows}</table></div>'
