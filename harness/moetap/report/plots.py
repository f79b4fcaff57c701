"""The plots of a study.

Knows which figures are drawn, with which axes, units and colours. Refuses to compute one: every
plot shows numbers that a table has too, and names the section with that table.

Colours are those of Okabe and Ito, which people with any colour vision can tell apart; each line
has its own marker besides. A plot is drawn for a theme: light, dark, or `CSS`, whose colours are
placeholders that `svg_inline` replaces by CSS variables, so that one drawing follows the reader's
preference.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from moetap.analysis.lanes import COLD_STEPS
from moetap.analysis.ledger import GB
from moetap.analysis.study import LEDGER, LOCALITY, OVERFLOW, UNION, Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

    from moetap.analysis.overflow import UnionCurve
    from moetap.analysis.unions import Figure

SIZE = (4.7, 3.7)
"""Inches. Small, so that text stays legible where the plot is as wide as a phone."""

FONT_SIZE = 11.5
MARKERS = "osD^vP"


@dataclass(frozen=True)
class Theme:
    """Colours of one drawing. background: None is transparent."""

    text: str
    grid: str
    series: tuple[str, ...]
    background: str | None


LIGHT = Theme(
    "#1a1a1a",
    "#cccccc",
    ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"),
    "#ffffff",
)
DARK = Theme(
    "#e6e6e6",
    "#4d4d4d",
    ("#56b4e9", "#e69f00", "#2fc79b", "#e39ac3", "#f0e442", "#d55e00"),
    "#161616",
)
# No real colour; each is replaced by the variable of the same place in `css_colors`.
CSS = Theme("#010203", "#040506", tuple(f"#0a0b0{i}" for i in range(1, 7)), None)


def css_colors(theme: Theme) -> dict[str, str]:
    """The CSS variables of a theme."""
    names = ["--text", "--grid", *(f"--s{i}" for i in range(1, 7))]
    return dict(zip(names, (theme.text, theme.grid, *theme.series), strict=True))


@dataclass(frozen=True)
class Plot:
    """One plot. section: of the report, with the same numbers as text. words: what it shows.
    missing: why there is nothing to draw, "" if there is something."""

    key: str
    title: str
    section: str
    words: str
    draw: Callable[[Axes, Study, Theme], None]
    missing: str = ""


NOTHING = "no decode step was executed"


def plots(study: Study) -> list[Plot]:
    """The plots of the parts that were asked for and are available."""
    return [plot for plot in _plots(study) if not plot.missing]


def left_out(study: Study) -> list[Plot]:
    """The plots that were asked for but have nothing to show; `missing` says why."""
    return [plot for plot in _plots(study) if plot.missing]


def _plots(study: Study) -> list[Plot]:
    parts = study.options.parts
    found = []
    if UNION in parts and study.unions:
        found += [
            Plot(
                "union-cdf",
                "Union of B lanes",
                UNION,
                "Share of (group, step, layer) triples with at most so many distinct experts, by "
                "B; dotted: mean of independent uniform routing.",
                _union_cdf,
                "" if _distributions(study) else NOTHING,
            ),
            Plot(
                "union-steps",
                "Union by decode step",
                UNION,
                "Mean union at each decode step by B, exact over all groups; shaded: the first "
                f"{COLD_STEPS} steps.",
                _union_steps,
                "" if _shown_curves(study) else NOTHING,
            ),
        ]
    if OVERFLOW in parts and study.overflow:
        found.append(
            Plot(
                "footprint",
                "Footprint by window",
                OVERFLOW,
                "Mean number of distinct experts that B lanes select over the last W steps, by B; "
                "dashed: C expert slots.",
                _footprint,
                ""
                if any(f.mean for f in study.overflow.footprints if f.draw.stratum == "all")
                else "no window was executed from end to end",
            )
        )
    if LOCALITY in parts and study.locality:
        ran = not np.isnan(study.locality.usage.heat).all()
        found += [
            Plot(
                "misses",
                "Miss rate by cache size",
                LOCALITY,
                "Share of look-ups that miss in an LRU cache of C slots per layer, all decode "
                "steps: line at B = 1 from the recency stack; marks at B lanes, which share the "
                "slots, from the replay.",
                _misses,
                "" if ran else NOTHING,
            ),
            Plot(
                "heat",
                "Use of each expert",
                LOCALITY,
                "Share of a layer's decode selections that go to each expert.",
                _heat,
                "" if ran else NOTHING,
            ),
            Plot(
                "lags",
                "Overlap with earlier steps",
                LOCALITY,
                "Experts shared with the step so many steps before, % of k, with the baselines: "
                "own steps shuffled, all steps shuffled, uniform.",
                _lags,
                "" if any(study.locality.lags[0].overlap) else "no two steps can be compared",
            ),
        ]
    if LEDGER in parts and study.ledger:
        found.append(
            Plot(
                "ledger",
                "RAM ledger",
                LEDGER,
                "Bytes needed on each Mac at its default C and the B of the criteria, stacked, "
                "beside its budgets: physical memory less headroom, and the working-set limits.",
                _ledger,
            )
        )
    return found


def plot_files(study: Study) -> Iterator[tuple[str, bytes]]:
    """(file name, content): each plot as PNG and SVG, light and dark."""
    for plot in plots(study):
        for name, theme in (("", LIGHT), ("-dark", DARK)):
            figure = _figure(plot, study, theme)
            for kind in ("png", "svg"):
                yield f"{plot.key}{name}.{kind}", saved(figure, kind)


def svg_inline(plot: Plot, study: Study, prefix: str) -> str:
    """The plot as an <svg> element whose colours are CSS variables and whose ids begin with
    `prefix`, so that several can stand in one page."""
    text = saved(_figure(plot, study, CSS), "svg").decode("utf-8")
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    text = text.replace("url(#", f"url(#{prefix}-").replace('href="#', f'href="#{prefix}-')
    for name, color in css_colors(CSS).items():
        text = text.replace(color, f"var({name})")
    # Scaled by CSS; the viewBox keeps the proportions.
    head, rest = text[: text.index(">")], text[text.index(">") :]
    return re.sub(r'\s(?:width|height)="[^"]*"', "", head) + rest


def _figure(plot: Plot, study: Study, theme: Theme) -> Drawing:
    return styled(plot.title, lambda axes: plot.draw(axes, study, theme), theme)


def styled(title: str, draw: Callable[[Axes], None], theme: Theme) -> Drawing:
    """A figure of one plot in the colours of a theme."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    figure.patch.set_alpha(0) if theme.background is None else figure.set_facecolor(
        theme.background
    )
    axes.patch.set_alpha(0)
    draw(axes)
    axes.set_title(title, loc="left", color=theme.text, fontsize=FONT_SIZE + 1)
    axes.tick_params(colors=theme.text, labelsize=FONT_SIZE)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_color(theme.text)
        label.set_fontsize(FONT_SIZE)
    for side, spine in axes.spines.items():
        spine.set_color(theme.text)
        spine.set_visible(side in ("left", "bottom"))
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        # Outside, where it hides nothing.
        figure.legend(
            handles, labels, loc="outside lower center", frameon=False, labelcolor=theme.text,
            ncols=4 if max(map(len, labels)) < 8 else 2, fontsize=FONT_SIZE,
        )  # fmt: skip
    return figure


def saved(figure: Drawing, kind: str) -> bytes:
    """The figure as "png" or "svg", the same bytes each time."""
    import matplotlib

    out = io.BytesIO()
    # Text as text: small, searchable, and in the reader's font. The salt keeps ids the same.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "moetap"}):
        figure.savefig(
            out, format=kind, dpi=160, metadata={"Date": None} if kind == "svg" else None
        )
    return out.getvalue()


def grid_lines(axes: Axes, theme: Theme) -> None:
    """Draw the grid below everything else."""
    axes.grid(True, color=theme.grid, linewidth=0.6)
    axes.set_axisbelow(True)


# -- the plots


def _distributions(study: Study) -> list[Figure]:
    """The lines over all streams and layers whose unions are known."""
    assert study.unions is not None
    lines = study.unions.select(study.unions.strata[0], ("overall",))
    return [f for f in lines if f.values is not None and f.values.distribution.n_triples]


def _shown_curves(study: Study) -> list[UnionCurve]:
    return [curve for curve in study.curves if curve.stratum == "all" and len(curve.steps)]


def _union_cdf(axes: Axes, study: Study, theme: Theme) -> None:
    for i, figure in enumerate(_distributions(study)):
        assert figure.values is not None
        counts = figure.values.distribution.histogram
        color = theme.series[i % 6]
        share = 100 * np.cumsum(counts) / counts.sum()
        axes.step(np.arange(len(counts)), share, where="post", color=color, label=f"B = {figure.b}")
        axes.axvline(figure.values.uniform, color=color, linestyle=":", linewidth=1.4)
    axes.plot([], [], color=theme.text, linestyle=":", label="uniform")
    axes.set_xlim(left=0)
    axes.set_ylim(0, 101)
    axes.set_xlabel("distinct experts in a step and layer")
    axes.set_ylabel("share of (group, step, layer), %")
    grid_lines(axes, theme)


def _union_steps(axes: Axes, study: Study, theme: Theme) -> None:
    curves = _shown_curves(study)
    last = max(int(curve.steps[-1]) for curve in curves)
    axes.axvspan(0, min(COLD_STEPS, last), color=theme.grid, alpha=0.35, linewidth=0)
    for i, curve in enumerate(curves):
        axes.plot(
            curve.steps,
            curve.mean,
            color=theme.series[i % 6],
            linewidth=1.3,
            label=f"B = {curve.b}",
        )
    axes.set_xlim(0, last or 1)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("decode step")
    axes.set_ylabel("mean union, experts")
    grid_lines(axes, theme)


def _footprint(axes: Axes, study: Study, theme: Theme) -> None:
    assert study.overflow is not None
    table = study.overflow
    for i, b in enumerate(table.sizes):
        found = [f for f in table.footprints if (f.draw.stratum, f.draw.b) == ("all", b) and f.mean]
        if not found:
            continue
        windows = [f.window for f in found]
        means = [f.mean for f in found if f.mean]
        color = theme.series[i % 6]
        axes.plot(
            windows,
            [m.value for m in means],
            color=color,
            marker=MARKERS[i % 6],
            markersize=4,
            label=f"B = {b}",
        )
    most = int(study.model.n_experts.max())
    for c in table.capacities:
        axes.axhline(c, color=theme.text, linestyle="--", linewidth=0.9)
        axes.annotate(
            f"C = {c}", (table.windows[0], c), ha="left", va="bottom", color=theme.text,
            fontsize=FONT_SIZE,
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks(table.windows, [str(w) if w != 24 else "" for w in table.windows])
    axes.minorticks_off()
    axes.set_ylim(0, 1.09 * most)
    axes.set_xlabel("window W, decode steps")
    axes.set_ylabel("footprint, experts")
    grid_lines(axes, theme)


def _misses(axes: Axes, study: Study, theme: Theme) -> None:
    assert study.locality is not None
    line = study.locality.reuse[0]  # all layers
    k, most = study.model.max_top_k, int(study.model.n_experts.max())
    if line.lookups:
        slots = np.arange(k, most + 1)
        hits = np.cumsum(line.depth)[slots - 1]
        axes.plot(
            slots, 100 * (1 - hits / line.lookups), color=theme.series[0], label="B = 1, any C"
        )
    if study.cache:
        for i, b in enumerate(study.cache.sizes):
            found = [study.cache.find("all", b, c) for c in study.cache.capacities]
            points = [(f.capacity, f.values.hit_rate.value) for f in found if f.values]
            if points:
                axes.plot(
                    [c for c, _ in points],
                    [100 * (1 - rate) for _, rate in points],
                    color=theme.series[i % 6],
                    linestyle="none",
                    marker=MARKERS[i % 6],
                    markersize=6,
                    label=f"B = {b}",
                )
    axes.set_xlim(0, 1.03 * most)
    axes.set_ylim(0, 100)
    axes.set_xlabel("C, expert slots per layer")
    axes.set_ylabel("look-ups that miss, %")
    grid_lines(axes, theme)


def _heat(axes: Axes, study: Study, theme: Theme) -> None:
    assert study.locality is not None
    heat = 100 * study.locality.usage.heat
    ran = heat[~np.isnan(heat)]
    # One hot expert would leave the rest of the scale empty.
    top = float(np.quantile(ran, 0.995)) if len(ran) else 1.0
    image = axes.imshow(
        heat, aspect="auto", cmap="cividis", vmin=0, vmax=top or 1.0, interpolation="nearest"
    )
    index = study.model.layer_index
    at = np.unique(np.linspace(0, len(index) - 1, min(len(index), 8)).round().astype(int))
    axes.set_yticks(at, [str(index[i]) for i in at])
    axes.set_xlabel("expert id")
    axes.set_ylabel("decoder layer")
    bar = axes.figure.colorbar(image, ax=axes, extend="max")
    bar.set_label("share of the layer's selections, %", color=theme.text, fontsize=FONT_SIZE)
    bar.ax.tick_params(colors=theme.text, labelsize=FONT_SIZE)
    bar.outline.set_visible(False)


def _lags(axes: Axes, study: Study, theme: Theme) -> None:
    assert study.locality is not None
    line = study.locality.lags[0]
    lags = np.arange(1, len(line.overlap) + 1)
    value = np.array([x.value if x else np.nan for x in line.overlap])
    low = np.array([x.low if x and x.low is not None else np.nan for x in line.overlap])
    high = np.array([x.high if x and x.high is not None else np.nan for x in line.overlap])
    axes.fill_between(
        lags, 100 * np.maximum(low, 0), 100 * np.minimum(high, 1), color=theme.series[0],
        alpha=0.2, linewidth=0,
    )  # fmt: skip
    axes.plot(lags, 100 * value, color=theme.series[0], label="overlap ± interval")
    for i, (name, values, style) in enumerate(
        (
            ("own steps shuffled", line.own, "--"),
            ("all steps shuffled", line.popular, "-."),
            ("uniform, k/E", line.uniform, ":"),
        )
    ):
        axes.plot(lags, 100 * values, color=theme.series[i + 1], linestyle=style, label=name)
    axes.set_xlim(1, len(lags))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("lag, decode steps")
    axes.set_ylabel("shared experts, % of k")
    grid_lines(axes, theme)


def _ledger(axes: Axes, study: Study, theme: Theme) -> None:
    assert study.ledger is not None
    lanes = study.options.criteria.lanes
    names = ("resident", "expert slots", "KV and state", "activations, overhead")
    rows = []
    for tier, slots in study.macs:
        line = study.ledger.line(tier, slots, lanes)
        t = line.terms
        rows.append(
            (
                line,
                (
                    t.resident_bytes,
                    t.arena_bytes,
                    t.kv_bytes + t.state_bytes,
                    t.activation_bytes + t.overhead_bytes,
                ),
            )
        )
    at = np.arange(len(rows))
    left = np.zeros(len(rows))
    hatches = ("", "///", "...", "xxx")
    for i, name in enumerate(names):
        sizes = np.array([parts[i] / GB for _, parts in rows])
        axes.barh(
            at, sizes, left=left, height=0.5, color=theme.series[i], label=name,
            hatch=hatches[i], edgecolor=theme.text, linewidth=0.4,
        )  # fmt: skip
        left += sizes
    marks = {
        "physical": ("|", "physical budget"),
        "older": ("^", "working set, older"),
        "newer": ("v", "working set, newer"),
        "device": ("^", "working set, this Mac"),
    }
    drawn = set()
    for y, (line, _) in zip(at, rows, strict=True):
        budgets = {"physical": line.tier.physical_bytes}
        budgets |= {limit.rule: limit.n_bytes for limit in line.tier.limits}
        for rule, n_bytes in budgets.items():
            marker, label = marks[rule]
            axes.plot(
                n_bytes / GB, y - 0.36, marker=marker, color=theme.text, linestyle="none",
                markersize=9 if marker == "|" else 6, markeredgewidth=2 if marker == "|" else 1,
                label=None if rule in drawn else label,
            )  # fmt: skip
            drawn.add(rule)
    axes.set_yticks(at, [f"{line.tier.ram_gib} GiB\nC = {line.terms.slots}" for line, _ in rows])
    axes.set_ylim(-0.7, len(rows) - 0.4)
    axes.set_xlabel(f"GB (10^9 bytes), B = {lanes}, {study.ledger.context:,} tokens a lane")
    axes.grid(True, axis="x", color=theme.grid, linewidth=0.6)
    axes.set_axisbelow(True)
