"""The plots of docs/performance.md show the page's own figures."""

from xml.etree import ElementTree

import pytest

from bench import plots
from bench.report import PAGE, markdown, row

SVG = "{http://www.w3.org/2000/svg}"
PEERS = (
    "sglang-router 0.3.2: 1.157e+04 us; a-runtime 1.6.1, from engine events: 848.8 us; b 2.0: p50 907.7 us, p99 1356 us"
)
ROWS = [
    row("job, 1k: CPU", 2100.0, "us", peer="smg 1.13.0: 375 us"),
    row("job, 1k: all peers", 4.0, "x", peer=PEERS),
    row("gap, over the engine's own", 1.25, "x", peer="direct: 8 ms; smg 1.13.0: 11.3 ms"),
]
FIGURES = plots.read(markdown(ROWS))


def test_a_plot_has_our_figure_and_that_of_every_peer_of_its_row():
    assert plots.Plot("CPU", {"mmrouter": "job, 1k: CPU"}, "job, 1k: CPU").bars(FIGURES) == [
        (2100, "mmrouter"),
        (375, "smg"),
    ]
    _, *others = plots.Plot("all", {"mmrouter": "job, 1k: CPU"}, "job, 1k: all peers").bars(FIGURES)
    assert others == [(11570, "sglang-router"), (848.8, "a-runtime"), (907.7, "b")]


def test_a_ratio_to_the_engine_alone_is_shown_as_a_time():
    name = "gap, over the engine's own"
    bars = plots.Plot("gap", {"mmrouter": name}, name, direct=True).bars(FIGURES)
    assert bars == [(10, "mmrouter"), (8, "engine alone"), (11.3, "smg")]


def test_a_row_that_the_page_lacks_is_named():
    with pytest.raises(plots.MissingFigureError, match="no row 'absent'"):
        plots.Plot("none", {"mmrouter": "absent"}).bars(FIGURES)


def test_the_committed_page_has_ten_plots_with_the_numbers_of_their_bars():
    page = PAGE.read_text()
    drawn = ElementTree.fromstring(plots.svg(page)).findall(f"{SVG}svg")
    assert len(drawn) == len(plots.PLOTS) == 10
    for plot, shown in zip(plots.PLOTS, drawn, strict=True):
        texts = [each.text or "" for each in shown.iter(f"{SVG}text")]
        bars = plot.bars(plots.read(page))
        labels = [text for text in texts if text.partition(":")[0] in {name for _, name in bars}]
        assert len(labels) == len(bars)
        assert plot.title in texts
