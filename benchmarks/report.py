"""Tables and plots from benchmarks/results/*.json alone: one command rewrites them in README.md and docs/benchmarks.md.

A table stands between `<!-- table NAME -->` and `<!-- end of table -->`. Results whose names begin alike (gpu.json,
gpu-70b.json) are one set of measurements; of two for the same cell the later one counts.
"""

import argparse
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import records

ROOT = Path(__file__).parents[1]
FILES = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md")
BLOCK = re.compile(r"(<!-- table (?P<name>[\w-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
NOTHING = "Not measured yet."

SAMPLE, XLA, MATMUL, GATHER = "sample", "categorical", "matmul", "gather logits"
COMPILED = ("compiled multinomial", "compiled exponential race")
FLASHINFER = ("FlashInfer", "FlashInfer, float32")


class Measured(NamedTuple):
    """Rows of results, in the order of their heads and sizes, and a line that says where they come from."""

    rows: list[dict[str, Any]]
    source: str


def measured(*names: str, key: Callable[[dict], tuple] = lambda row: ()) -> Measured:
    """All results of these names (with `*`, as for files); `key` tells rows of the same head and size apart."""
    paths = [path for name in names for path in records.RESULTS.glob(f"{name}.json")]
    results = sorted((records.load(path.stem) for path in paths), key=lambda result: result["environment"]["date"])
    cells = {}
    for result in results:
        for row in result["rows"]:
            cells[(row["head"]["vocab"] * row["head"]["d_model"], row["rows"], *key(row))] = row, result
    ordered = [cells[at] for at in sorted(cells)]
    used = [result for result in results if any(result is of for _, of in ordered)]
    files: dict[str, list[str]] = {}  # by what they were made with
    for result in used:
        where = result["environment"]
        versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
        cores = f" ({where['cores']} cores)" if where["platform"] == "cpu" else ""
        made = f"{where['device']}{cores}, Python {where['python']}, {versions}; commit {where['commit']}, {where['date'][:10]}"
        files.setdefault(made, []).append(f"`{result['name']}.json`")
    lines = [f"{', '.join(sorted(names))}: {made}" for made, names in files.items()]
    return Measured([row for row, _ in ordered], "; ".join(lines) + ".")


def head_name(head: dict[str, Any]) -> str:
    return f"{head['name']}, {head['vocab']:,} x {head['d_model']:,}"


def markdown(columns: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    columns = list(columns)
    return "\n".join("| " + " | ".join(line) + " |" for line in (columns, ["---"] * len(columns), *map(list, lines)))


def median(row: dict[str, Any] | None, *names: str) -> float | None:
    """Seconds of the fastest of the named contenders that were measured, or None."""
    times = [row["seconds"][name]["median"] for name in names if row is not None and name in row["seconds"]]
    return min(times, default=None)


def quotient(a: float | None, b: float | None, most: float = float("inf")) -> str:
    """a / b, bold where it is over `most`."""
    if a is None or b is None:
        return ""
    text = f"{a / b:.2f}"
    return f"**{text}**" if a / b > most else text


def first_of_each(names: Iterable[Any]) -> list[Any]:
    """Names, blank where they repeat the one above."""
    shown, last = [], None
    for name in names:
        shown.append("" if name == last else name)
        last = name
    return shown


class Cell(NamedTuple):
    """One head and number of rows on the GPU: what jax measured, and what torch did."""

    row: dict[str, Any]
    torch: dict[str, Any] | None

    def against(self) -> dict[str, tuple[float | None, float]]:
        """Seconds of what `sample` is compared with, and the largest ratio that is no miss."""
        return {"the floor": (self.row["floor"], 1.05), "XLA `categorical`": (median(self.row, XLA), 1.0),
                "torch, compiled sampler": (median(self.torch, *COMPILED), 1.0),
                "FlashInfer": (median(self.torch, *FLASHINFER), 1.0)}


def gpu_cells() -> tuple[list[Cell], str]:
    ours, theirs = measured("gpu", "gpu-*"), measured("torch", "torch-*")
    by_cell = {(row["head"]["name"], row["rows"]): row for row in theirs.rows}
    cells = [Cell(row, by_cell.get((row["head"]["name"], row["rows"]))) for row in ours.rows]
    return cells, " ".join([ours.source] + [theirs.source] * bool(theirs.rows))


def gpu_ratios() -> str:
    """Time of `sample` over that of others, a line for each head and each of them."""
    cells, source = gpu_cells()
    if not cells:
        return NOTHING
    sizes = sorted({cell.row["rows"] for cell in cells})
    lines = []
    for name in dict.fromkeys(head_name(cell.row["head"]) for cell in cells):
        here = {cell.row["rows"]: cell for cell in cells if head_name(cell.row["head"]) == name}
        for other in next(iter(here.values())).against():
            line = [quotient(median(here[n].row, SAMPLE), *here[n].against()[other]) if n in here else "" for n in sizes]
            if any(line):
                lines.append((name, other, line))
    heads = first_of_each(name for name, _, _ in lines)
    return markdown(["head", "time of `sample` over", *map(str, sizes)],
                    [[head, other, *line] for head, (_, other, line) in zip(heads, lines, strict=True)]) + f"\n\n{source}"


def gpu_times() -> str:
    """Microseconds, by jax."""
    rows, source = measured("gpu", "gpu-*")
    if not rows:
        return NOTHING
    names = list(dict.fromkeys(name for row in rows for name in row["seconds"] if name != "read w"))
    lines = []
    for head, row in zip(first_of_each(head_name(row["head"]) for row in rows), rows, strict=True):
        share = row.get("temp_share_of_logits")
        lines.append([head, str(row["rows"]), row["implementation"], *(microseconds(row, name) for name in names),
                      f"{1e6 * row['floor']:.1f}", "" if share is None else f"{100 * share:.1f}%"])
    return markdown(["head", "rows", "runs", *names, "floor", "memory"], lines) + f"\n\n{source}"


def torch_times() -> str:
    """Microseconds, by torch; a star: not from a CUDA graph."""
    rows, source = measured("torch", "torch-*")
    if not rows:
        return NOTHING
    names = list(dict.fromkeys(name for row in rows for name in row["seconds"]))
    lines = [[head, str(row["rows"]),
              *(microseconds(row, name) + "*" * (row["how"].get(name, "CUDA graph") != "CUDA graph") for name in names)]
             for head, row in zip(first_of_each(head_name(row["head"]) for row in rows), rows, strict=True)]
    how = {f"{name}: {how}" for row in rows for name, how in row["how"].items() if how != "CUDA graph"}
    return markdown(["head", "rows", *names], lines) + f"\n\n{' '.join(f'(* {x}.)' for x in sorted(how))} {source}".rstrip(" ")


def microseconds(row: dict[str, Any], name: str) -> str:
    return f"{1e6 * row['seconds'][name]['median']:.1f}" if name in row["seconds"] else ""


def cpu_times() -> str:
    """Milliseconds."""
    rows, source = measured("cpu")
    if not rows:
        return NOTHING
    names = list(rows[0]["seconds"])
    lines = [[head, str(row["rows"]), *(f"{1e3 * row['seconds'][name]['median']:.1f}" for name in names),
              quotient(row["ratio"][SAMPLE]["median"], 1.0, row["target"] or float("inf"))]
             for head, row in zip(first_of_each(head_name(row["head"]) for row in rows), rows, strict=True)]
    return markdown(["head", "rows", *names, "sample / categorical"], lines) + f"\n\n{source}"


def cpu_ratios() -> str:
    """Time of `sample` over that of XLA's `categorical`, a line for each head."""
    rows, source = measured("cpu")
    if not rows:
        return NOTHING
    sizes = sorted({row["rows"] for row in rows})
    lines = []
    for name in dict.fromkeys(head_name(row["head"]) for row in rows):
        here = {row["rows"]: row["ratio"][SAMPLE]["median"] for row in rows if head_name(row["head"]) == name}
        lines.append([name, *(quotient(here.get(n), 1.0, 1.0) for n in sizes)])
    return markdown(["head", *map(str, sizes)], lines) + f"\n\n{source}"


def log_prob_times() -> str:
    """Microseconds, and MiB of temporary memory."""
    rows, source = measured("log_prob", "log_prob-*", key=lambda row: (row["pass"] != "forward",))
    if not rows:
        return NOTHING
    names = list(rows[0]["temp_bytes"])
    lines = []
    for head, row in zip(first_of_each(head_name(row["head"]) for row in rows), rows, strict=True):
        cells = [f"{1e6 * row['seconds'][name]['median']:.1f} ({row['temp_bytes'][name] / 2**20:.1f})" for name in names]
        lines.append([head, str(row["rows"]), row["pass"], *cells, quotient(median(row, "log_prob"), row.get("floor"), 1.05)])
    return markdown(["head", "rows", "pass", *names, "`log_prob` / floor"], lines) + f"\n\n{source}"


def shard_times() -> str:
    """Microseconds of one shard's work; bold where it is over the bar."""
    rows, source = measured("shards", "shards-*", key=lambda row: (row["shards"],))
    if not rows:
        return NOTHING
    names = list(dict.fromkeys(name for row in rows for name in row["seconds"]))
    lines = []
    for head, row in zip(first_of_each(head_name(row["head"]) for row in rows), rows, strict=True):
        over = row["seconds"]["shard"]["median"] - row["bar"] + 1.08 * row["floor"]  # the time without the bar's microseconds
        lines.append([head, str(row["rows"]), str(row["shards"]), row["implementation"],
                      *(microseconds(row, name) for name in names), f"{1e6 * row['floor']:.1f}",
                      quotient(over, row["floor"], 1.08)])
    return markdown(["head", "rows", "shards", "runs", *names, "floor", "(shard - 6 us) / floor"], lines) + f"\n\n{source}"


def quantized_times() -> str:
    """Microseconds of heads of 8 bits and how many times as fast they are; bold where that is under its bar."""
    rows, source = measured("quantized", "quantized-*")
    if not rows:
        return NOTHING
    names = list(rows[0]["speedup"])
    lines = []
    for head, row in zip(first_of_each(head_name(row["head"]) for row in rows), rows, strict=True):
        bar = 1.75 if row["rows"] <= 32 else 1.0
        speedups = [row["speedup"][name]["median"] for name in names]
        lines.append([head, str(row["rows"]), row["implementation"][names[0]],
                      *(microseconds(row, name) for name in row["seconds"]),
                      *(f"{x:.2f}" if x >= bar else f"**{x:.2f}**" for x in speedups)])
    columns = ["head", "rows", "runs", *rows[0]["seconds"], *(f"bfloat16 / {name}" for name in names)]
    return markdown(columns, lines) + f"\n\n{source}"


def sharded_rows() -> Measured:
    return measured("sharded", "sharded-*", key=lambda row: (row["devices"],))


def sharded_times() -> str:
    """Microseconds, what several devices gain, and bytes that one of them hears of in a call."""
    rows, source = sharded_rows()
    if not rows:
        return NOTHING
    names = list(dict.fromkeys(name for row in rows for name in row["seconds"]))
    lines, shown = [], first_of_each((head_name(row["head"]), row["rows"]) for row in rows)
    for head, place, row in zip(first_of_each(head_name(row["head"]) for row in rows), shown, rows, strict=True):
        lines.append([head, str(place and row["rows"]), str(row["devices"]), *(microseconds(row, name) for name in names),
                      f"{row['speedup'][SAMPLE]['median']:.2f}", f"{row['efficiency'][SAMPLE]:.0%}",
                      quotient(median(row, GATHER), median(row, SAMPLE)),
                      *(f"{row['collective_bytes'][name]:,}" for name in (SAMPLE, GATHER))])
    columns = ["head", "rows", "devices", *names, "speed-up of `sample`", "efficiency", f"{GATHER} / `sample`",
               "bytes of `sample`", f"bytes of {GATHER}"]
    return markdown(columns, lines) + f"\n\n{source}"


def verify_times() -> str:
    """Microseconds of verification from hidden states; bold where it is slower than its bar or than the idiom."""
    rows, source = measured("verify", "verify-*", key=lambda row: (row["draft_len"], row["wanted"]))
    if not rows:
        return NOTHING
    lines = []
    for place, row in zip(first_of_each((row["rows"], row["draft_len"]) for row in rows), rows, strict=True):
        ours, idiom, floor = (median(row, name) for name in ("verify", "log-softmax", "floor"))
        memory = row["temp_bytes"]
        lines.append([str(place and row["rows"]), str(place and row["draft_len"]), f"{row['acceptance']:.2f}",
                      *(f"{1e6 * t:.1f}" for t in (ours, idiom, floor)), quotient(ours, floor, 1.25),
                      quotient(ours, idiom, 1.0),
                      f"{100 * memory['verify'] / memory['log-softmax']:.1f}%"])
    columns = ["rows", "drafted", "overlap", "`verify`", "log-softmax idiom", "floor", "`verify` / floor", "`verify` / idiom",
               "memory / idiom's"]
    return markdown(columns, lines) + f"\n\n{source}"


def filter_times() -> str:
    """Microseconds of `sample` under filters on a GPU; bold where they cost more than their bar."""
    rows, source = measured("filters-gpu", "filters-gpu-*",
                            key=lambda row: (row["filters"], row["logits"], row["processors"]))
    if not rows:
        return NOTHING
    lines = []
    for name, row in zip(first_of_each((head_name(row["head"]), row["rows"]) for row in rows), rows, strict=True):
        plain, ours, idiom = (median(row, name) for name in ("sample", "filtered", "idiom"))
        filters = row["filters"] + " with mask and bias" * row["processors"]
        lines.append([str(name and name[0]), str(name and row["rows"]), filters, row["logits"],
                      *("" if t is None else f"{1e6 * t:.1f}" for t in (plain, ours, idiom)),
                      quotient(ours, plain, 1.25 if row["rows"] <= 64 else 1.4), quotient(idiom, ours)])
    columns = ["head", "rows", "filters", "logits", "`sample`", "with filters", "idiom", "with / without", "idiom / ours"]
    return markdown(columns, lines) + f"\n\n{source}"


def decode_times() -> str:
    """Milliseconds per output token."""
    rows, source = measured("decode", "decode-*", key=lambda row: (row["sampling"],))
    if not rows:
        return NOTHING
    theirs = measured("transformers", "transformers-*", key=lambda row: (row["sampling"],))
    peer = {(row["head"]["name"], row["rows"], row["sampling"]): row for row in theirs.rows}
    lines = []
    for name, row in zip(first_of_each(head_name(row["head"]) for row in rows), rows, strict=True):
        ours = median(row, "gumbeljax")
        other = median(peer.get((row["head"]["name"], row["rows"], row["sampling"])), "generate")
        profile = row.get("profile", {"copies_to_host": ""})
        idle = f"{100 * row['idle_share']:.1f}%" if "idle_share" in row else ""
        lines.append([name, str(row["rows"]), row["sampling"], milliseconds(ours), milliseconds(row["roofline"]),
                      quotient(ours, row["roofline"]), milliseconds(median(row, "XLA idiom")),
                      quotient(median(row, "XLA idiom"), ours), milliseconds(other), quotient(other, ours), idle,
                      str(profile["copies_to_host"])])
    columns = ["model's head", "rows", "sampling", "ours", "roofline", "ours / roofline", "XLA sampling", "XLA / ours",
               "transformers", "transformers / ours", "idle", "copies to the host"]
    return markdown(columns, lines) + f"\n\n{' '.join([source] + [theirs.source] * bool(theirs.rows))}"


def milliseconds(t: float | None) -> str:
    return "" if t is None else f"{1e3 * t:.2f}"


TABLES: dict[str, Callable[[], str]] = {
    "cpu-times": cpu_times, "cpu-ratios": cpu_ratios, "gpu-ratios": gpu_ratios, "gpu-times": gpu_times,
    "torch-times": torch_times, "log-prob-times": log_prob_times, "decode-times": decode_times,
    "shard-times": shard_times, "sharded-times": sharded_times, "verify-times": verify_times, "filter-times": filter_times,
    "quantized-times": quantized_times,
}


def with_tables(text: str) -> str:
    """A page with the tables that the results say."""
    return BLOCK.sub(lambda block: f"{block[1]}{TABLES[block['name']]()}\n{block[3]}", text)


def plotted(cells: list[Cell]) -> list[tuple[dict[str, Any], dict[str, float]]]:
    """What `plot.plot_over_rows` shows: `sample`, the rows of `gpu_ratios` but the floor, and the product alone."""
    shown = []
    for cell in cells:
        seconds = {"`sample`": median(cell.row, SAMPLE), **{name: t for name, (t, _) in list(cell.against().items())[1:]},
                   "matrix product alone": median(cell.row, MATMUL)}
        shown.append((cell.row, {name.replace("`", ""): t for name, t in seconds.items() if t is not None}))
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__.splitlines()[0])
    parser.parse_args()
    for path in FILES:
        path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
        print(f"wrote the tables of {path.relative_to(ROOT)}")
    from benchmarks import plot  # matplotlib

    plot.draw()
    cells, source = gpu_cells()
    if cells:
        path = records.RESULTS / "gpu.png"
        plot.plot_over_rows(plotted(cells), source.split(";")[0].split(": ")[1]).savefig(path, dpi=120)
        print(f"wrote {path}")
    rows, source = sharded_rows()
    if rows:
        path = records.RESULTS / "sharded.png"
        plot.plot_speedups(rows, SAMPLE, GATHER, source.split(";")[0].split(": ")[1]).savefig(path, dpi=120)
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
