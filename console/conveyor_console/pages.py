"""Renders the pages from the templates. Every value is escaped: names, reasons and messages come from tenants."""

import hashlib
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined

from conveyor_console.callers import show_caller, show_service
from conveyor_console.events import Event
from conveyor_console.history import Course
from conveyor_console.overview import Line, Trouble, show_seconds
from conveyor_console.past import Past
from conveyor_console.pictures import (
    LINES_HEIGHT,
    STEPS_HEIGHT,
    WIDTH,
    Chart,
    StepPicture,
    draw_lines,
    draw_steps,
    show_time,
)
from conveyor_console.requests import Waiting
from conveyor_console.services import Service
from conveyor_console.usage import DAYS
from conveyor_insight.receipts import explain_receipt
from conveyor_protocol.engine_pages import StepRecord
from conveyor_protocol.usage import RequestReceipt
from conveyor_protocol.usage_rows import UsageRow

LINES_A_PAGE: Final = 50
_MAX_PICTURES: Final = 4
_MAX_ROWS: Final = 200  # of usage
_MAX_USED: Final = 10  # of usage, on the page of a service
_ENVIRONMENT: Final = Environment(
    loader=PackageLoader("conveyor_console"),
    autoescape=True,
    auto_reload=False,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_UNKNOWN: Final = "–"


def _show_time(seconds: float | None) -> str:
    return _UNKNOWN if seconds is None else show_seconds(seconds)


def _show_rate(rate: float | None) -> str:
    if rate is None:
        return _UNKNOWN
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.1f}"


def _show_share(share: float | None) -> str:
    return _UNKNOWN if share is None else f"{share:.0%}"


def _find_id(key: str) -> str:
    """Return the `id` of a service's line, which needs no escape in selectors."""
    return f"s{hashlib.sha256(key.encode()).hexdigest()[:16]}"


_ENVIRONMENT.globals |= {"width": WIDTH, "steps_height": STEPS_HEIGHT, "lines_height": LINES_HEIGHT}
_ENVIRONMENT.filters |= {"time": _show_time, "rate": _show_rate, "share": _show_share, "line_id": _find_id}
_ENVIRONMENT.filters |= {"caller": show_caller, "service_of": show_service}


@dataclass(frozen=True, slots=True)
class Overview:
    """One page of the overview, for one caller. `number`: of the page, from 1. `num_seen`: of lines without a query."""

    lines: Sequence[Line]
    num_seen: int
    number: int
    num_pages: int
    summary: str
    query: str


def build_overview(lines: Sequence[Line], query: str, number: int, problem: str) -> Overview:
    """Return a page of the lines whose service contains the query. problem: why figures are missing, or ""."""
    found = [line for line in lines if query in line.service.key] if query else lines
    num_pages = max(1, -(-len(found) // LINES_A_PAGE))
    number = min(max(1, number), num_pages)
    shown = found[(number - 1) * LINES_A_PAGE : number * LINES_A_PAGE]
    return Overview(shown, len(lines), number, num_pages, _summarize(found, problem), query)


def _summarize(lines: Sequence[Line], problem: str) -> str:
    counts = {trouble: sum(line.trouble is trouble for line in lines) for trouble in Trouble}
    down, well = counts[Trouble.DOWN], counts[Trouble.WELL] + counts[Trouble.ASLEEP]
    noun = "service" if len(lines) == 1 else "services"
    text = f"{len(lines):,} {noun}: {down:,} not ready, {len(lines) - down - well:,} to look at, {well:,} well."
    return f"{text} Some figures are missing: {problem}" if problem else text


def render_overview(overview: Overview, caller: str, stream: str, read_at: float) -> str:
    """Return the whole page. stream: URL of the events with its changes. read_at: Unix time of what it shows."""
    return _render("overview.html", overview=overview, caller=caller, stream=stream, as_of=show_time(read_at))


def render_as_of(read_at: float) -> str:
    """Return the element with the time, for a stream of any page. read_at: Unix time."""
    return _render("as_of.html", as_of=show_time(read_at), swaps=True)


def render_stopped(reason: str) -> str:
    """Return the element that replaces the time when the stream ends. reason: a sentence."""
    return _render("stopped.html", reason=reason)


@dataclass(frozen=True, slots=True)
class Detail:
    """What the page of one service shows."""

    line: Line
    charts: Sequence[Chart]
    decisions: Sequence[tuple[str, str]]
    pictures: Sequence[StepPicture]
    waiting: Sequence[Waiting]


def build_detail(
    line: Line,
    course: Course,
    decisions: Sequence[tuple[float, str]],
    steps: Mapping[str, Sequence[StepRecord]],
    waiting: Sequence[Waiting],
) -> Detail:
    charts = [
        draw_lines("Requests", course.times, queued=course.queued, at_engines=course.at_engines),
        draw_lines("Replicas", course.times, ready=course.ready, desired=course.desired),
        draw_lines("Tokens/s", course.times, generated=course.tokens),
    ]
    pictures = [draw_steps(engine, each) for engine, each in sorted(steps.items())[:_MAX_PICTURES] if each]
    return Detail(line, charts, [(show_time(at), words) for at, words in decisions], pictures, waiting)


def render_service(
    detail: Detail,
    caller: str,
    receipts: Sequence[RequestReceipt],
    usage: Sequence[UsageRow],
    events: Sequence[Event],
    no_events: str,
    read_at: float,
    *,
    has_playground: bool,
) -> str:
    """Return the whole page. Receipts, usage and Events do not change while it is open.

    read_at: Unix time of the rest.
    """
    told, used = list(map(explain_receipt, receipts)), _limit(usage, _MAX_USED)
    shown = {"events": events, "no_events": no_events, "receipts": told, "as_of": show_time(read_at), **used}
    shown["has_playground"] = has_playground
    return _render("service.html", detail=detail, caller=caller, **shown)


def render_usage(rows: Sequence[UsageRow], seen: Set[str], days: int, problem: str, caller: str) -> str:
    """Return the page that shows who used what. problem: why there are no rows, or "".

    seen: namespaces whose services the caller sees. Services of others have no link.
    """
    problem = problem or ("" if rows else "You may see nothing of what was used in this time.")
    periods = [(each, "Today" if each == 1 else f"{each} days") for each in DAYS]
    shown = {**_limit(rows, _MAX_ROWS), "seen": seen, "days": days, "periods": periods}
    return _render("usage.html", **shown, problem=problem, caller=caller)


def _limit(rows: Sequence[UsageRow], most: int) -> dict[str, Any]:
    """Return the values of the template `used.html`."""
    return {"used": rows[:most], "num_left_out": max(0, len(rows) - most)}


def render_receipt(request_id: str, receipt: RequestReceipt | None, caller: str) -> str:
    """Return the page that says where the time of a request went. receipt: None if there is none for the caller."""
    words, service, ended = "", "", ""
    if receipt is not None:
        words, service, ended = explain_receipt(receipt), receipt.service, show_time(receipt.ended_unix)
    return _render("request.html", request_id=request_id, words=words, service=service, ended=ended, caller=caller)


def render_past(service: Service, past: Past, caller: str) -> str:
    """Return the page with the past of a service. The page of the service takes its section."""
    return _render("past_page.html", service=service, past=past, caller=caller)


def render_detail(detail: Detail) -> str:
    """Return the part of the page that changes."""
    return _render("detail.html", detail=detail, swaps=True)


def render_sign_in(problem: str = "") -> str:
    return _render("sign_in.html", problem=problem)


def render_problem(title: str, message: str) -> str:
    return _render("problem.html", title=title, message=message)


def render_playground(part: str, **values: Any) -> str:
    """Return the template of a part of the page for trying a service."""
    return _render(f"try_{part}.html", **values)


class Changes:
    """Renders what has changed on a page since the last call, as elements that htmx puts in place of the old ones."""

    def __init__(self) -> None:
        self._lines: dict[str, str] = {}
        self._summary = ""

    def render(self, overview: Overview) -> str:
        """Return the elements; "" if nothing has changed. The first call returns all of them."""
        lines = {line.service.key: _render("line.html", line=line, swaps=True) for line in overview.lines}
        parts = []
        if list(lines) != list(self._lines):
            parts.append(_render("lines.html", overview=overview, swaps=True))
        else:
            parts += [text for key, text in lines.items() if text != self._lines[key]]
        if overview.summary != self._summary:
            parts.append(_render("summary.html", overview=overview, swaps=True))
        self._lines, self._summary = lines, overview.summary
        return "".join(parts)


def _render(template: str, **values: Any) -> str:
    known: Mapping[str, Any] = {"swaps": False}
    return _ENVIRONMENT.get_template(template).render({**known, **values})
