"""Charts as inline SVG: colours come from the page's style sheet, so that one picture serves light and dark.

Every chart has axes with labels, units in the label, and a legend; every text is escaped.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, isfinite, log10

WIDTH, HEIGHT = 540, 330
# Pictures that stand three in a row: their text is as large on the page as that of the others.
NARROW = 400, 270
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 14, 48
COLOURS = 8
LEGEND_ROW = 20
# Width of one character of the 12 px labels, a little generous: the page's font is not known here.
CHARACTER = 6.7


@dataclass(frozen=True)
class Line:
    """One series: y against x, with an optional band (low, high) of the same length."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    is_reference: bool = False

    def colour(self, index: int) -> str:
        """Classes of the line's colour and dashes: a bound or target is drawn grey and dashed beside the series."""
        return "ref" if self.is_reference else _colour(index)


@dataclass(frozen=True)
class Steps:
    """One histogram: heights between edges; len(edges) = len(heights) + 1."""

    label: str
    edges: Sequence[float]
    heights: Sequence[float]


@dataclass(frozen=True)
class Dots:
    """One group of points."""

    label: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True)
class Estimate:
    """One row of an interval chart; low and high may be nan."""

    label: str
    value: float
    low: float
    high: float


def line_chart(title: str, x_label: str, y_label: str, lines: Sequence[Line], from_zero: bool = False) -> str:
    """Lines with bands; values that are not finite interrupt a line."""
    xs = [x for line in lines for x in line.x if isfinite(x)]
    ys = [y for line in lines for s in (line.y, line.low or (), line.high or ()) for y in s if isfinite(y)]
    if not xs or not ys:
        return ""
    ys += [0.0] if from_zero else []
    legend = [(line.label, line.colour(index)) for index, line in enumerate(lines)]
    frame = _Frame(title, x_label, y_label, (min(xs), max(xs)), (min(ys), max(ys)), legend)
    body = []
    for index, line in enumerate(lines):
        colour = line.colour(index)
        if line.low is not None and line.high is not None:
            edges = zip(line.x, line.low, line.high, strict=True)
            band = [(x, a, b) for x, a, b in edges if isfinite(a) and isfinite(b)]
            outline = [(x, b) for x, _, b in band] + [(x, a) for x, a, _ in reversed(band)]
            if len(band) > 1:
                points = " ".join(frame.point(x, y) for x, y in outline)
                body.append(f'<polygon class="band {colour}" points="{points}"/>')
        for run in _finite_runs(line.x, line.y):
            if len(run) == 1:
                x, y = frame.point(*run[0]).split(",")
                body.append(f'<circle class="dot {colour}" cx="{x}" cy="{y}" r="3.5"/>')
            else:
                points = " ".join(frame.point(x, y) for x, y in run)
                body.append(f'<polyline class="line {colour}" points="{points}"/>')
    return frame.render(body)


def histogram(title: str, x_label: str, y_label: str, series: Sequence[Steps]) -> str:
    """Outlined histograms over each other, filled faintly, in a narrow picture."""
    edges = [e for s in series for e in s.edges]
    heights = [h for s in series for h in s.heights]
    if not heights or not all(map(isfinite, edges + heights)):
        return ""
    legend = [(one.label, _colour(index)) for index, one in enumerate(series)]
    frame = _Frame(title, x_label, y_label, (min(edges), max(edges)), (0.0, max(heights)), legend, NARROW)
    body = []
    for index, one in enumerate(series):
        corners = [(one.edges[0], 0.0)]
        for left, right, height in zip(one.edges, one.edges[1:], one.heights, strict=False):
            corners += [(left, height), (right, height)]
        corners.append((one.edges[-1], 0.0))
        points = " ".join(frame.point(x, y) for x, y in corners)
        colour = _colour(index)
        body.append(f'<polygon class="band {colour}" points="{points}"/>')
        body.append(f'<polyline class="line {colour}" points="{points}"/>')
    return frame.render(body)


def scatter_chart(title: str, x_label: str, y_label: str, groups: Sequence[Dots]) -> str:
    """Points by group in a narrow picture; one length is the same on both axes, so that angles are true."""
    points = [(x, y) for g in groups for x, y in zip(g.x, g.y, strict=True) if isfinite(x) and isfinite(y)]
    if not points:
        return ""
    (left, right), (low, high) = ((min(axis), max(axis)) for axis in zip(*points, strict=True))
    width, height = NARROW
    inside = (width - LEFT - RIGHT) / (height - TOP - BOTTOM)
    tall = max(high - low, (right - left) / inside) * 1.04 or 1.0
    x, y, half = (left + right) / 2, (low + high) / 2, tall / 2
    across, up = (x - half * inside, x + half * inside), (y - half, y + half)
    legend = [(group.label, _colour(index)) for index, group in enumerate(groups)]
    frame = _Frame(title, x_label, y_label, across, up, legend, NARROW, is_exact=True)
    body = []
    for index, group in enumerate(groups):
        for x, y in zip(group.x, group.y, strict=True):
            if isfinite(x) and isfinite(y):
                cx, cy = frame.point(x, y).split(",")
                body.append(f'<circle class="dot {_colour(index)}" cx="{cx}" cy="{cy}" r="2" opacity="0.7"/>')
    return frame.render(body)


def interval_chart(
    title: str,
    x_label: str,
    rows: Sequence[Estimate],
    value_label: str,
    reference: float = 0.0,
) -> str:
    """One row per estimate: a dot, and its interval as a bar; a line at `reference`, which is always in the picture."""
    numbers = [v for r in rows for v in (r.value, r.low, r.high) if isfinite(v)]
    if not numbers:
        return ""
    numbers.append(reference)
    left = min(220, max(LEFT, 16 + int(CHARACTER * max(len(r.label) for r in rows))))
    step = 26
    height = TOP + step * len(rows) + BOTTOM + LEGEND_ROW
    low, high = _padded(min(numbers), max(numbers))
    ticks = nice_ticks(low, high, 6)
    bottom = TOP + step * len(rows)

    def place(value: float) -> float:
        return left + (value - low) / (high - low) * (WIDTH - left - RIGHT)

    parts = [_open(title, height)]
    for tick in ticks:
        x = place(tick)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}"/>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{_number(tick)}</text>')
    x = place(reference)
    parts.append(f'<line class="zero" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}"/>')
    for index, row in enumerate(rows):
        y = TOP + step * (index + 0.5)
        room = int((left - 10) / CHARACTER)
        name = row.label if len(row.label) <= room else row.label[: room - 1] + "\N{HORIZONTAL ELLIPSIS}"
        tip = f"<title>{escape(row.label)}</title>"
        parts.append(f'<text class="name" x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(name)}{tip}</text>')
        if isfinite(row.low) and isfinite(row.high):
            a, b = place(row.low), place(row.high)
            parts.append(f'<line class="bar c0" x1="{a:.1f}" x2="{b:.1f}" y1="{y}" y2="{y}"/>')
        if isfinite(row.value):
            parts.append(f'<circle class="dot c0" cx="{place(row.value):.1f}" cy="{y}" r="4.5"/>')
    middle = (left + WIDTH - RIGHT) / 2
    parts.append(f'<text class="axis" x="{middle:.0f}" y="{bottom + 36}" text-anchor="middle">{escape(x_label)}</text>')
    y = bottom + BOTTOM + 6
    parts.append(f'<circle class="dot c0" cx="{left + 6}" cy="{y - 4}" r="4.5"/>')
    parts.append(f'<text class="name" x="{left + 16}" y="{y}">{escape(value_label)}</text>')
    return "".join([*parts, "</svg>"])


def nice_ticks(low: float, high: float, count: int) -> list[float]:
    """At most about `count` multiples of 1, 2 or 5 times a power of ten inside [low, high]."""
    raw = (high - low) / count
    power = 10.0 ** floor(log10(raw))
    unit = power * next(m for m in (1, 2, 5, 10) if m * power >= raw * (1 - 1e-9))
    first, last = ceil(low / unit - 1e-9), floor(high / unit + 1e-9)
    return [i * unit for i in range(first, last + 1)]


class _Frame:
    """Axes, grid and legend of a chart with two numeric axes."""

    def __init__(
        self,
        title: str,
        x_label: str,
        y_label: str,
        x_range: tuple[float, float],
        y_range: tuple[float, float],
        series: Sequence[tuple[str, str]],
        size: tuple[int, int] = (WIDTH, HEIGHT),
        is_exact: bool = False,
    ) -> None:
        self.width, self.plot_height = size
        self.title, self.x_label, self.y_label = title, x_label, y_label
        self.x0, self.x1 = x_range if x_range[1] > x_range[0] else _padded(*x_range)
        self.y0, self.y1 = y_range if is_exact else _padded(*y_range)
        self.y0 = y_range[0] if y_range[0] == 0 else self.y0
        self.legend, rows = _legend(series, size)
        self.height = self.plot_height + LEGEND_ROW * rows

    def point(self, x: float, y: float) -> str:
        across = LEFT + (x - self.x0) / (self.x1 - self.x0) * (self.width - LEFT - RIGHT)
        down = self.plot_height - BOTTOM - (y - self.y0) / (self.y1 - self.y0) * (self.plot_height - TOP - BOTTOM)
        return f"{across:.1f},{down:.1f}"

    def render(self, body: Sequence[str]) -> str:
        parts = [_open(self.title, self.height, self.width)]
        right, bottom = self.width - RIGHT, self.plot_height - BOTTOM
        for tick in nice_ticks(self.y0, self.y1, 6):
            y = self.point(self.x0, tick).split(",")[1]
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y}" y2="{y}"/>')
            text = f'x="{LEFT - 6}" y="{float(y) + 4:.1f}" text-anchor="end">{_number(tick)}'
            parts.append(f'<text class="tick" {text}</text>')
        for tick in nice_ticks(self.x0, self.x1, 7):
            x = self.point(tick, self.y0).split(",")[0]
            parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{TOP}" y2="{bottom}"/>')
            parts.append(f'<text class="tick" x="{x}" y="{bottom + 16}" text-anchor="middle">{_number(tick)}</text>')
        parts += body
        parts.append(f'<path class="frame" d="M{LEFT} {TOP}V{bottom}H{right}"/>')
        middle = (LEFT + right) / 2
        text = f'x="{middle}" y="{bottom + 36}" text-anchor="middle">{escape(self.x_label)}'
        parts.append(f'<text class="axis" {text}</text>')
        centre = (TOP + bottom) / 2
        parts.append(
            f'<text class="axis" transform="translate(14 {centre}) rotate(-90)" text-anchor="middle">'
            f"{escape(self.y_label)}</text>"
        )
        return "".join([*parts, *self.legend, "</svg>"])


def _open(title: str, height: float, width: int = WIDTH) -> str:
    name = escape(title, quote=True)
    kind = "chart" if width == WIDTH else "chart narrow"
    return f'<svg class="{kind}" viewBox="0 0 {width} {height:g}" role="img" aria-label="{name}"><title>{name}</title>'


def _legend(series: Sequence[tuple[str, str]], size: tuple[int, int]) -> tuple[list[str], int]:
    """A line and a label for each (label, colour classes), wrapped into rows below the plot; and how many rows."""
    parts, x, row = [], float(LEFT), 0
    room = int((size[0] - LEFT - RIGHT - 24) / CHARACTER)
    for label, colour in series:
        short = label if len(label) <= room else label[: room - 1] + "\N{HORIZONTAL ELLIPSIS}"
        width = 34 + CHARACTER * len(short)
        if x > LEFT and x + width > size[0] - RIGHT:
            x, row = float(LEFT), row + 1
        y = size[1] + LEGEND_ROW * row + 6
        parts.append(f'<line class="line {colour}" x1="{x:.0f}" x2="{x + 18:.0f}" y1="{y - 4}" y2="{y - 4}"/>')
        parts.append(f'<text class="name" x="{x + 24:.0f}" y="{y}">{escape(short)}</text>')
        x += width
    return parts, row + 1


def _colour(index: int) -> str:
    """Classes of the colour of a series, with dashes from the ninth on."""
    return f"c{index % COLOURS}" + (f" d{index // COLOURS % 4}" if index >= COLOURS else "")


def _padded(low: float, high: float) -> tuple[float, float]:
    room = 0.05 * (high - low) or 0.05 * abs(high) or 0.5
    return low - room, high + room


def _number(value: float) -> str:
    if value and (abs(value) >= 1e6 or abs(value) < 1e-4):
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:.6g}"


def _finite_runs(x: Sequence[float], y: Sequence[float]) -> list[list[tuple[float, float]]]:
    runs: list[list[tuple[float, float]]] = [[]]
    for a, b in zip(x, y, strict=True):
        if isfinite(a) and isfinite(b):
            runs[-1].append((a, b))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]
