"""Plots of benchmark results, from their JSON alone: results/<name>.json -> results/<name>.png."""

import argparse
from collections.abc import Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks import records

COLOURS = ("#1b7837", "#7b8fa6", "#b9c4d0", "#e3d3a8")  # in the order of the contenders: ours first, floors last
LINES = ("#1b7837", "#7b8fa6", "#b2182b", "#d6a32c", "#b9c4d0")  # ours first
NEEDED = {"head", "rows", "seconds", "ratio"}


def plot_ratios(result: dict[str, Any]) -> plt.Figure:
    """A panel for each head: times relative to the base (quartiles), over rows; milliseconds on the bars."""
    heads = list({row["head"]["name"]: row["head"] for row in result["rows"]}.values())
    names = list(result["rows"][0]["seconds"])
    figure, axes = plt.subplots(
        1, len(heads), figsize=(6.5 * len(heads), 4), squeeze=False, sharey=True, layout="constrained"
    )
    for axis, head in zip(axes[0], heads, strict=True):
        rows = [row for row in result["rows"] if row["head"] == head]
        width = 0.85 / len(names)
        for i, name in enumerate(names):
            at = [j + (i - (len(names) - 1) / 2) * width for j in range(len(rows))]
            ratios = [row["ratio"][name] for row in rows]
            spread = [[abs(r["median"] - r[q]) for r in ratios] for q in ("q25", "q75")]
            colour = COLOURS[i % len(COLOURS)]
            bars = axis.bar(at, [r["median"] for r in ratios], width, yerr=spread, capsize=2, label=name, color=colour)
            axis.bar_label(bars, [f"{1e3 * row['seconds'][name]['median']:.3g}" for row in rows], padding=2, fontsize=8)
            if i == 0:
                for x, row in zip(at, rows, strict=True):
                    if row.get("target") is not None:
                        axis.hlines(row["target"], x - width / 2, x + width / 2, colors="#b2182b", linestyles="dotted")
        axis.axhline(1, color="#7b8fa6", linewidth=0.8, zorder=0)
        axis.set(xticks=range(len(rows)), xticklabels=[row["rows"] for row in rows], xlabel="rows")
        axis.set_title(f"{head['name']}: {head['vocab']:,} x {head['d_model']:,}", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel(f"time / {result['base']}")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=len(names), frameon=False)
    where = result["environment"]
    cores = f", {where['cores']} cores" if where["platform"] == "cpu" else ""
    dotted = "; dotted: the target" if any(row.get("target") is not None for row in result["rows"]) else ""
    figure.suptitle(f"{where['device']}{cores}, jax {where['versions']['jax']}. On the bars: ms per call{dotted}", fontsize=10)
    return figure


def plot_over_rows(cells: Sequence[tuple[dict[str, Any], dict[str, float]]], title: str) -> plt.Figure:
    """A panel for each head: times over the floor (1 is the best that can be), over rows. A cell is a row of results and the
    seconds of every contender shown."""
    heads = list({row["head"]["name"]: row["head"] for row, _ in cells}.values())
    names = list(dict.fromkeys(name for _, seconds in cells for name in seconds))
    figure, axes = plt.subplots(1, len(heads), figsize=(5 * len(heads), 4), squeeze=False, sharey=True, layout="constrained")
    for axis, head in zip(axes[0], heads, strict=True):
        here = [(row, seconds) for row, seconds in cells if row["head"] == head]
        for i, name in enumerate(names):
            points = [(row["rows"], seconds[name] / row["floor"]) for row, seconds in here if name in seconds]
            axis.plot(*zip(*points, strict=True) if points else ((), ()), marker="o", markersize=4, label=name,
                      color=LINES[i % len(LINES)], linewidth=2.5 if i == 0 else 1.5)
        sizes = [row["rows"] for row, _ in here]
        axis.axhline(1, color="black", linewidth=0.8, zorder=0)
        axis.set_xscale("log", base=2)
        axis.set(xticks=sizes, xticklabels=sizes, xlabel="rows")
        axis.set_title(f"{head['name']}: {head['vocab']:,} x {head['d_model']:,}", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("time / floor")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=len(names), frameon=False)
    figure.suptitle(title, fontsize=10)
    return figure


def plot_speedups(rows: Sequence[dict[str, Any]], ours: str, other: str, title: str) -> plt.Figure:
    """A panel for each head: the time of `ours` on one device over that of `ours` (solid) and of `other` (dashed) on several,
    a colour for each number of rows."""
    heads = list({row["head"]["name"]: row["head"] for row in rows}.values())
    sizes = sorted({row["devices"] for row in rows})
    colour = {batch: plt.get_cmap("viridis")(i / 5) for i, batch in enumerate(sorted({row["rows"] for row in rows}))}
    figure, axes = plt.subplots(1, len(heads), figsize=(5 * len(heads), 4), squeeze=False, sharey=True, layout="constrained")
    for axis, head in zip(axes[0], heads, strict=True):
        for batch in sorted({row["rows"] for row in rows if row["head"] == head}):
            here = {row["devices"]: row["seconds"] for row in rows if row["head"] == head and row["rows"] == batch}
            for name, style in ((ours, "-"), (other, "--")):
                points = [(n, here[1][ours]["median"] / seconds[name]["median"]) for n, seconds in sorted(here.items())]
                axis.plot(*zip(*points, strict=True), style, marker="o", markersize=4, color=colour[batch],
                          label=f"{name}, {batch} rows")
        axis.plot(sizes, sizes, color="black", linewidth=0.8, zorder=0)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        axis.set(xticks=sizes, xticklabels=sizes, xlabel="devices", yticks=sizes, yticklabels=sizes)
        axis.set_title(f"{head['name']}: {head['vocab']:,} x {head['d_model']:,}", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel(f"speed, {ours} on one device = 1")
    lines = {label: line for axis in axes[0] for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    order = [f"{name}, {batch} rows" for batch in colour for name in (ours, other)]
    figure.legend([lines[label] for label in order], order, loc="outside lower center", ncols=len(colour), frameon=False,
                  fontsize=8)
    figure.suptitle(title, fontsize=10)
    return figure


def draw(names: Sequence[str] = ()) -> None:
    """Bars for the named results, or for all of a CPU that hold times by head and rows."""
    for name in names or sorted(path.stem for path in records.RESULTS.glob("*.json")):
        result = records.load(name.removesuffix(".json"))
        is_cpu = result["environment"]["platform"] == "cpu"
        if not names and not (is_cpu and all(row.keys() >= NEEDED for row in result["rows"])):
            continue
        path = records.RESULTS / f"{name.removesuffix('.json')}.png"
        plot_ratios(result).savefig(path, dpi=120)
        print(f"wrote {path}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description=__doc__)
    parser.add_argument("names", nargs="*", help="results to plot (default: those of CPUs that hold times by head and rows)")
    draw(parser.parse_args().names)


if __name__ == "__main__":
    main()
