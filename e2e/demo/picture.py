"""The demo's story as an SVG for light and dark pages: requests above, pods below. Reads no cluster."""

from collections.abc import Callable, Sequence
from html import escape

from e2e.demo.story import Sample, Story

WIDTH, LEFT, RIGHT = 520, 40, 12  # its text can be read on a phone, where it is shown at two thirds of its size
TOPS, HEIGHT = (64, 232), 120  # of the two charts
ROWS = (18, 36, 54)  # of the words below them
STYLE = """
svg { font: 13px system-ui, sans-serif; }
text { fill: #1f2328; } .dim { fill: #59636e; } .grid { stroke: #d1d9e0; } .event { stroke: #818b98; }
.back { fill: #ffffff; } .flight { stroke: #0969da; } .queue { stroke: #bc4c00; } .wanted { stroke: #59636e; }
.ready { fill: #2da44e; } .line { fill: none; stroke-width: 2; } .event, .wanted { stroke-dasharray: 4 4; }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc; } .dim { fill: #9198a1; } .grid { stroke: #3d444d; } .event { stroke: #656c76; }
  .back { fill: #0d1117; } .flight { stroke: #4493f8; } .queue { stroke: #db6d28; } .wanted { stroke: #9198a1; }
  .ready { fill: #2ea043; }
}"""

Read = Callable[[Sample], float]


def build_svg(story: Story, title: str) -> str:
    """Return the picture. `story` must have samples. An unknown value is drawn as the last known one."""
    seconds = (story.samples[-1].at - story.began) * 1.05  # the last values stay in sight
    most = max(1.0, *(sample.in_flight or 0 for sample in story.samples))
    pods = max(1.0, *(float(max(sample.desired, sample.ready)) for sample in story.samples))
    in_flight = _steps(story, seconds, TOPS[0], most, _known(lambda sample: sample.in_flight))
    queue = _steps(story, seconds, TOPS[0], most, _known(lambda sample: sample.queue_depth))
    wanted = _steps(story, seconds, TOPS[1], pods, lambda sample: sample.desired)
    ready = _steps(story, seconds, TOPS[1], pods, lambda sample: sample.ready)
    bottom = TOPS[1] + HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 66}" role="img">',
        f"<title>{escape(title)}</title><style>{STYLE}</style>",
        f'<rect class="back" width="{WIDTH}" height="{bottom + 66}" rx="6"/>',
        f'<text x="{LEFT}" y="24" font-weight="600">{escape(title)}</text>',
        *_frame(TOPS[0], most, [("requests in flight", "flight"), ("waiting", "queue")]),
        f'<path class="line flight" d="{in_flight}"/><path class="line queue" d="{queue}"/>',
        *_frame(TOPS[1], pods, [("pods ready", "ready"), ("desired by the HPA", "wanted")]),
        f'<path class="ready" fill-opacity=".35" d="{ready} V{bottom} H{LEFT} Z"/>',
        f'<path class="line wanted" d="{wanted}"/>',
        *_events(story, seconds, bottom),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _known(read: Callable[[Sample], float | None]) -> Read:
    last = 0.0

    def known(sample: Sample) -> float:
        nonlocal last
        value = read(sample)
        last = last if value is None else value
        return last

    return known


def _x(at: float, seconds: float) -> float:
    return LEFT + at / seconds * (WIDTH - LEFT - RIGHT)


def _steps(story: Story, seconds: float, top: int, most: float, read: Read) -> str:
    """Draw a path in steps. Each value holds until the next sample."""
    y = top + HEIGHT - read(story.samples[0]) / most * HEIGHT
    path = f"M{LEFT} {y:.1f}"
    for sample in story.samples[1:]:
        path += f" H{_x(sample.at - story.began, seconds):.1f}"
        if (below := top + HEIGHT - read(sample) / most * HEIGHT) != y:
            path, y = f"{path} V{below:.1f}", below
    return f"{path} H{WIDTH - RIGHT}"


def _frame(top: int, most: float, legend: Sequence[tuple[str, str]]) -> list[str]:
    bottom, x, parts = top + HEIGHT, float(LEFT), list[str]()
    for y, value in ((top, most), (bottom, 0)):
        parts.append(f'<path class="grid" d="M{LEFT} {y} H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="dim" x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{value:g}</text>')
    for name, kind in legend:
        shape = f'<path class="{kind} line" d="M{x} {top - 12} h18"/>'
        if kind == "ready":
            shape = f'<rect class="ready" fill-opacity=".35" x="{x}" y="{top - 18}" width="18" height="11"/>'
        parts.append(f'{shape}<text x="{x + 24}" y="{top - 8}">{escape(name)}</text>')
        x += 40 + 8 * len(name)
    return parts


def _events(story: Story, seconds: float, bottom: int) -> list[str]:
    """Draw the events, in rows of words below the pods, so that neighbours do not overlap."""
    marks = [
        (0.0, "burst"), (story.decided, "HPA sets 3"), (story.all_ready, "3 ready"),
        (story.burst_ended, "burst over"), (story.back_to_one, "1 again"),
    ]  # fmt: skip
    parts = []
    for number, (at, words) in enumerate((at, words) for at, words in marks if at is not None):
        x, y = _x(at, seconds), bottom + ROWS[number % len(ROWS)]
        anchor = "end" if x > WIDTH - 130 else "start"
        parts.append(f'<path class="event" d="M{x:.1f} {TOPS[0]} V{y - 12}"/>')
        parts.append(f'<text class="dim" x="{x:.1f}" y="{y}" text-anchor="{anchor}">{at:.1f} s: {words}</text>')
    return parts
