"""The miss-rate curve as a plot.

Knows its axes and lines. Refuses to compute: it shows what the table and the files have.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from moetap.analysis.replay import GLOBAL, RULES
from moetap.analysis.replay_study import Curve
from moetap.report.plots import DARK, LIGHT, Theme, grid_lines, saved, styled
from moetap.report.replay_table import DECODE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLES = (("all", DECODE, "-"), ("steady", ("steady",), ":"))


def curve_files(curve: Curve) -> Iterator[tuple[str, bytes]]:
    """(file name, content): the plot as PNG and SVG, light and dark."""
    title = f"Miss rate, {RULES[curve.options.rule]}, B = {curve.options.b}"
    for name, theme in (("", LIGHT), ("-dark", DARK)):
        figure = styled(title, partial(draw_curve, curve=curve, theme=theme), theme)
        for kind in ("png", "svg"):
            yield f"curve{name}.{kind}", saved(figure, kind)


def draw_curve(axes: Axes, curve: Curve, theme: Theme) -> None:
    """LRU and Belady over C, all decode steps and steady ones; shaded: C at which a step's set may
    not fit and passes are forced."""
    largest = curve.largest_set(DECODE)
    if largest > curve.capacities[0]:
        axes.axvspan(
            0, largest, color=theme.grid, alpha=0.5, linewidth=0, label="extra passes forced"
        )
    for color, policy in zip(theme.series, curve.policies, strict=False):
        for label, phases, style in STYLES:
            rates = [(c, curve.miss_rate(policy, c, phases)) for c in curve.capacities]
            points = [(c, 100 * rate) for c, rate in rates if rate is not None]
            if points:
                axes.plot(*zip(*points, strict=True), style, color=color, label=f"{policy} {label}")
    axes.set_xlim(0, 1.03 * curve.capacities[-1])
    axes.set_ylim(0, None)
    shared = curve.options.scope == GLOBAL
    axes.set_xlabel(f"expert slots, {'shared by all layers' if shared else 'C per layer'}")
    axes.set_ylabel("look-ups that miss, %")
    grid_lines(axes, theme)
