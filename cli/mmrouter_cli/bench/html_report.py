"""Runs as one self-contained HTML page: tables, and plots as inline SVG. Pure."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jinja2
import leather
from leather import theme

from mmrouter_cli.bench.run_statistics import Line, by_mode, groups, lines, objections, quantiles, summary, verdict
from mmrouter_cli.bench.terminal import POINTS, doubts, facts, figures, headings, title
from mmrouter_cli.bench.types import Result

WIDTH, HEIGHT = 560, 360
SLICES = 20
"""Intervals of a run, with one point each in the plot of hits."""
COLOURS = ("#1f6feb", "#d1571d", "#3a7d44")

theme.background_color = "none"  # the page's, light or dark, as the texts are
theme.tick_color = "#8884"
for _text in ("title", "legend", "axis_title", "label"):
    setattr(theme, f"{_text}_color", "currentColor")
for _font in ("title", "legend", "axis_title", "tick"):
    setattr(theme, f"{_font}_font_family", "sans-serif")

Points = list[tuple[float, float]]
HEADLINES = ("first token, p50", "first token, p95", "hit ratio", "requests per second", "failed")


class Tile(NamedTuple):
    """A headline figure. ``against``: the first run's, empty without one."""

    name: str
    value: str
    unit: str
    against: str
    judgement: str


def page(results: Sequence[Result]) -> str:
    """Return the page of one run, of two with their comparison unless there are objections, or of encoder modes."""
    compared = len(results) == 2 and not by_mode(results)
    refusals = objections(*results) if compared else None
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True).from_string(
        Path(__file__).with_name("html_report.html").read_text()
    )
    comparison = lines(*results) if refusals == [] else []
    return template.render(
        points=POINTS,
        results=results,
        objections=refusals,
        comparison=comparison,
        verdict=verdict(comparison) if comparison else summary(results[0]) if len(results) == 1 else "",
        tiles=_tiles(results, comparison),
        groups=groups,
        headings=headings(*results) if compared else [],
        plots=[plot for plot in _plots(results) if plot],
        title=title,
        figures=figures,
        facts=facts,
        doubts=doubts,
    )


def _tiles(results: Sequence[Result], comparison: Sequence[Line]) -> list[Tile]:
    """Return the headline figures of one run, or of the second of two, with how it compares to the first."""
    if not comparison:
        comparison = lines(results[0], results[0]) if len(results) == 1 else []
    tiles = []
    for line in comparison:
        if line.name not in HEADLINES or line.second is None:
            continue
        value = f"{line.second:,.0f}" if line.second >= 100 else f"{line.second:,.3g}"
        before = "" if len(results) == 1 else _against(line)
        tiles.append(Tile(line.name, value, line.unit, before, line.judgement))
    return tiles


def _against(line: Line) -> str:
    _, first, _, ratio = line.texts()
    if ratio == "-":
        return f"{first} before"
    return f"{first} before, {ratio}" + ("" if line.judgement else ", within the noise")


def _plots(results: Sequence[Result]) -> list[str]:
    names = headings(*results) if len(results) > 1 else [None]
    percentile, time = ("percentile", "ms"), "seconds from the start"
    first = [_by_percentile(quantiles([row.first for row in result.rows])) for result in results]
    between = [_by_percentile(result.gaps) for result in results]
    over_time = [[(row.started, 1000 * row.first) for row in result.rows] for result in results]
    return [
        _plot("first token by percentile", percentile, first, names),
        _plot("time between tokens by percentile", percentile, between, names),
        _plot("first token over time", (time, "ms"), over_time, names, dots=True),
        _plot("hits over time", (time, "% of prompt tokens"), [_hits(result) for result in results], names),
    ]


def _by_percentile(values: Sequence[float]) -> Points:
    return [(float(percent), 1000 * value) for percent, value in enumerate(values)]


def _hits(result: Result) -> Points:
    """Return the hit ratio of each interval in which it is known."""
    points: Points = []
    width = result.seconds / SLICES
    for number in range(SLICES):
        rows = [row for row in result.rows if number * width <= row.started < (number + 1) * width]
        prompt = sum(row.prompt or 0 for row in rows if row.cached is not None)
        if prompt:
            points.append(((number + 0.5) * width, 100 * sum(row.cached or 0 for row in rows) / prompt))
    return points


def _plot(
    name: str, axes: tuple[str, str], series: Sequence[Points], names: Sequence[str | None], *, dots: bool = False
) -> str:
    """Return a plot as SVG with both axes from 0; empty without points."""
    drawn = [points for points in series if points]
    if not drawn:
        return ""
    chart = leather.Chart(name)
    for axis, values in enumerate(zip(*(point for points in drawn for point in points), strict=True)):
        (chart.add_y_scale if axis else chart.add_x_scale)(0, max(values) or 1)
    chart.add_x_axis(name=axes[0], tick_formatter=_tick)
    chart.add_y_axis(name=axes[1], tick_formatter=_tick)
    for points, label, colour in zip(series, names, COLOURS, strict=False):
        if not points:
            continue
        if dots:
            chart.add_dots(points, name=label, fill_color=colour, radius=2)
        else:
            chart.add_line(points, name=label, stroke_color=colour)
    drawing = str(chart.to_svg(width=WIDTH, height=HEIGHT))  # XML, every text in it escaped
    return drawing.replace("<svg ", f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" ', 1)  # scales on a narrow screen


def _tick(value: float, index: int, count: int) -> str:
    return f"{value:g}"
