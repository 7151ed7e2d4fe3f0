"""The demo's story as an SVG, in the style of `conveyor_insight.svg`: requests above, pods below. Reads no cluster."""

from collections.abc import Callable
from html import escape

from conveyor_insight.svg import STYLE, Axis, draw_grid, draw_legend
from e2e.demo.story import Sample, Story

WIDTH, LEFT, RIGHT = 520, 40, 12  # its text can be read on a phone, where it is shown at two thirds of its size
TOPS, HEIGHT = (64, 232), 120  # of the two charts
BOTTOM = TOPS[1] + HEIGHT
ROWS = (18, 36, 54)  # of the words below them
FLIGHT, QUEUE, READY, WANTED = 3, 1, 5, 0  # numbers of colours

Read = Callable[[Sample], float]


def build_svg(story: Story, title: str) -> str:
    """Return the picture. `story` must have samples. An unknown value is drawn as the last known one."""
    seconds = (story.samples[-1].at - story.began) * 1.05  # the last values stay in sight
    requests = _Chart(story, seconds, TOPS[0], [_known(lambda s: s.in_flight), _known(lambda s: s.queue_depth)])
    pods = _Chart(story, seconds, TOPS[1], [lambda s: s.desired, lambda s: s.ready])
    (in_flight, queue), (desired, ready) = requests.paths, pods.paths
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {BOTTOM + 66}" role="img">{STYLE}',
        f"<title>{escape(title)}</title><style>text{{font-size:13px}}.small{{font-size:12px}}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{BOTTOM + 66}" rx="6"/>',
        f'<text class="fg title" x="{LEFT}" y="24">{escape(title)}</text>',
        requests.grid, draw_legend([("requests in flight", FLIGHT), ("waiting", QUEUE)], LEFT, TOPS[0] - 18),
        _line("flight", FLIGHT, in_flight), _line("queue", QUEUE, queue),
        pods.grid, draw_legend([("pods ready", READY), ("desired by the HPA", WANTED)], LEFT, TOPS[1] - 18),
        f'<path class="ready f{READY}" fill-opacity=".35" d="{ready} V{BOTTOM} H{LEFT} Z"/>',
        _line("wanted", WANTED, desired, "4 4"), *_events(story, seconds), "</svg>",
    ]  # fmt: skip
    return "\n".join(parts) + "\n"


def _known(read: Callable[[Sample], float | None]) -> Read:
    last = 0.0

    def known(sample: Sample) -> float:
        nonlocal last
        value = read(sample)
        last = last if value is None else value
        return last

    return known


class _Chart:
    """A path in steps for each reading, in which a value holds until the next sample, and the grid behind them."""

    def __init__(self, story: Story, seconds: float, top: int, reads: list[Read]) -> None:
        self._xs = [_x(sample.at - story.began, seconds) for sample in story.samples]
        self._top = top
        values = [[read(sample) for sample in story.samples] for read in reads]
        self._axis = Axis(0, max(1.0, *map(max, values)), "")
        self.grid = draw_grid(self._axis, (LEFT, WIDTH - RIGHT), (top, top + HEIGHT))
        self.paths = [self._draw(each) for each in values]

    def _draw(self, values: list[float]) -> str:
        ys = [self._top + HEIGHT * (1 - self._axis.share(value)) for value in values]
        path = f"M{LEFT} {ys[0]:.1f}"
        for x, y, before in zip(self._xs[1:], ys[1:], ys, strict=False):
            path += f" H{x:.1f}" + (f" V{y:.1f}" if y != before else "")
        return f"{path} H{WIDTH - RIGHT}"


def _x(at: float, seconds: float) -> float:
    return LEFT + at / seconds * (WIDTH - LEFT - RIGHT)


def _line(name: str, colour: int, path: str, dashes: str = "none") -> str:
    return f'<path class="{name} s{colour}" fill="none" stroke-width="2" stroke-dasharray="{dashes}" d="{path}"/>'


def _events(story: Story, seconds: float) -> list[str]:
    """Draw the events, in rows of words below the pods, so that neighbours do not overlap."""
    marks = [
        (0.0, "burst"), (story.decided, "HPA sets 3"), (story.all_ready, "3 ready"),
        (story.burst_ended, "burst over"), (story.back_to_one, "1 again"),
    ]  # fmt: skip
    parts = []
    for number, (at, words) in enumerate((at, words) for at, words in marks if at is not None):
        x, y = _x(at, seconds), BOTTOM + ROWS[number % len(ROWS)]
        anchor = "end" if x > WIDTH - 130 else "start"
        parts.append(f'<path class="event s{WANTED}" stroke-dasharray="4 4" d="M{x:.1f} {TOPS[0]} V{y - 12}"/>')
        parts.append(f'<text class="dim" x="{x:.1f}" y="{y}" text-anchor="{anchor}">{at:.1f} s: {words}</text>')
    return parts
