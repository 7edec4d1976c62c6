"""The plots of docs/performance.md: ten figures of docs/performance-figures.md as bars, in one SVG.

Each plot shows mmrouter's figure and those of the peers of the same run, which the page names in a row's last cell.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import leather
from leather import theme

from bench.report import PAGE
from bench.serving.proxy_overhead import DIRECT

FILE = PAGE.with_name("performance.svg")
OURS, OTHERS = "#1f6feb", "#9aa4b2"
WIDTH, HEIGHT = 560, 200
"""Of one plot; two stand beside each other."""
ROW = re.compile(r"^\| (?P<name>[^|]+) \| (?P<value>[^|]+) \| [^|]* \| [^|]* \| (?P<peer>[^|]*) \|$", re.MULTILINE)
PEER = re.compile(r"(?P<name>[\w.\- ']+?)(?: \d[\w.]*)?(?:, [\w ]+)?: (?:p50 )?(?P<value>[\d.,e+]+)")
"""A peer, its release, how it was driven, and its figure."""


class Figure(NamedTuple):
    """A row of the page: its number, and the numbers of the peers that it names."""

    value: float
    peers: Mapping[str, float]


class MissingFigureError(ValueError):
    """The page has no row that a plot needs."""


@dataclass(frozen=True)
class Plot:
    """Bars of rows of the page. ``ours``: label -> row. ``peers``: the row that names the peers.

    ``direct``: ``ours`` is a ratio to the engine without a router, which the row of the peers names.
    """

    title: str
    ours: Mapping[str, str]
    peers: str = ""
    direct: bool = False

    @property
    def own(self) -> int:
        """How many of the bars are mmrouter's."""
        return len(self.ours)

    def bars(self, figures: Mapping[str, Figure]) -> list[tuple[float, str]]:
        """Return values and labels, mmrouter's own first. Raises :class:`MissingFigureError`."""
        try:
            peers = figures[self.peers].peers if self.peers else {}
            own = {label: figures[name].value for label, name in self.ours.items()}
            unit = peers[DIRECT] if self.direct else 1
        except KeyError as error:
            raise MissingFigureError(f"{PAGE.name} has no row {error}: python -m bench --write") from error
        others = {("engine alone" if name == DIRECT else name): value for name, value in peers.items()}
        return [(value * unit, label) for label, value in own.items()] + [
            (value, name) for name, value in others.items()
        ]


@dataclass(frozen=True)
class Multiples(Plot):
    """Bars of rows that say how far above mmrouter's figure another one is."""

    own = 1

    def bars(self, figures: Mapping[str, Figure]) -> list[tuple[float, str]]:
        return [(1.0, "mmrouter"), *super().bars(figures)]


CPU = "CPU per request"
GAP = "stall, new prompts of 32k tokens: token gap, p99, over the engine's own"
TTFT = "cluster: TTFT p95 below {}, mean"
POLICIES = ("Dynamo's scorer", "text prefix", "consistent hash", "least loaded", "round robin")
PLOTS = (
    Multiples("First token (p95), simulated clusters, ratio", {name: TTFT.format(name) for name in POLICIES}),
    Plot(
        "Decision among 64 workers, us",
        {"mmrouter": "decision, 64 workers: p50"},
        "decision, 64 workers: below Dynamo, p50",
    ),
    Plot(
        "Placement among 1,000 workers, us",
        {
            "round robin": "placement, 1000 workers, round robin: p50",
            "kv": "placement, 1000 workers, kv: p50",
            "kv after a change": "placement, 1000 workers, after a change: p50",
        },
    ),
    Plot(
        "Whole job, 1,000 new tokens: CPU, us",
        {"mmrouter": f"job, 1k new tokens, 1 connection: {CPU}"},
        f"job, 1k new tokens, 1 connection: {CPU}",
    ),
    Plot(
        "Whole job, a new picture of 1 MB: CPU, us",
        {"mmrouter": f"job, new image of 1 MB, 1 connection: {CPU}"},
        f"job, new image of 1 MB, 1 connection: {CPU}",
    ),
    Plot(
        "CPU per streamed token, us",
        {"mmrouter": "proxy, paced 10 ms, 64 connections: CPU per token"},
        "proxy, paced 10 ms, 64 connections: CPU per token, over the better Rust router",
    ),
    Plot("Token gap beside 32k prompts (p99), ms", {"mmrouter": GAP}, GAP, direct=True),
    Plot(
        "Feed at the router, CPU s per M blocks",
        {"mmrouter": "router ingest, steps of 16 1-block events: over CURVE sockets"},
        "router ingest, steps of 16 1-block events: below Dynamo",
    ),
    Plot(
        "Index: bytes per block",
        {"mmrouter": "memory, 64 workers: per unique block"},
        "memory, 64 workers: per unique block, over Dynamo",
    ),
    Plot(
        "Memory with 2,500 streams, MiB",
        {"mmrouter": "connections, 2,000 idle and 500 active streams: resident"},
        "connections, 2,000 idle and 500 active streams: resident, over the better Rust router",
    ),
)


def read(page: str) -> dict[str, Figure]:
    """Return the rows of the page that have a number, by name."""
    figures: dict[str, Figure] = {}
    for row in ROW.finditer(page):
        number = re.match(r"[\d.,]+", row["value"])
        if number:
            peers = {peer["name"].strip(): float(peer["value"].replace(",", "")) for peer in PEER.finditer(row["peer"])}
            figures[row["name"].strip()] = Figure(float(number[0].replace(",", "")), peers)
    return figures


def svg(page: str) -> str:
    """Return the plots of the page's figures. Raises :class:`MissingFigureError`."""
    theme.background_color, theme.label_color, theme.tick_color = "#ffffff", "#333333", "#dddddd"
    for font in ("title", "legend", "axis_title", "tick"):
        setattr(theme, f"{font}_font_family", "sans-serif")
    figures = read(page)
    drawn = [_draw(plot, figures) for plot in PLOTS]
    places = [(WIDTH * (number % 2), HEIGHT * (number // 2)) for number in range(len(drawn))]
    placed = (each.replace("<svg ", f'<svg x="{x}" y="{y}" ', 1) for each, (x, y) in zip(drawn, places, strict=True))
    height = HEIGHT * -(-len(drawn) // 2)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH} {height}" font-family="sans-serif">'
    return "\n".join([head, *placed, "</svg>", ""])


def _draw(plot: Plot, figures: Mapping[str, Figure]) -> str:
    """Return one plot, with the numbers beside the names, because a bar alone shows none."""
    bars = plot.bars(figures)
    own = {_label(value, name) for value, name in bars[: plot.own]}
    chart = leather.Chart(plot.title)
    chart.add_x_scale(0, max(value for value, _ in bars))
    chart.add_bars(
        [(value, _label(value, name)) for value, name in bars], fill_color=lambda bar: OURS if bar.y in own else OTHERS
    )
    return str(chart.to_svg(width=WIDTH, height=HEIGHT))


def _label(value: float, name: str) -> str:
    return f"{name}: {value:.3g}" if value < 1000 else f"{name}: {value:,.0f}"
