"""Collectives of a compiled function, read from its HLO."""

import math
import re
from collections import Counter
from typing import NamedTuple

SIZES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8,
         "f64": 8}
KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute|collective-broadcast|ragged-all-to-all"


class Collective(NamedTuple):
    kind: str
    num_bytes: int  # of its result, on one device


def bytes_of(shapes: str) -> int:
    """Bytes of every array named in an HLO type, tuples included."""
    total = 0
    for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", shapes):
        total += SIZES[dtype] * math.prod(int(d) for d in dims.split(",") if d)
    return total


def computations(text: str) -> dict[str, str]:
    """The text of each computation by its name."""
    return {match[1]: body for body in re.split(r"\n(?=\S)", text) if (match := re.match(r"(?:ENTRY )?%?([\w.-]+)", body))}


def executed(compiled) -> Counter[Collective]:
    """How often each collective runs in one call, loops of known trip counts taken into account (XLA may unroll them).

    Raises ValueError for one in a loop whose trip count is not known.
    """
    text = compiled.as_text()
    bodies = computations(text)

    def of(name: str) -> Counter[Collective]:
        found = Counter()
        for line in bodies[name].splitlines()[1:]:
            found.update(of_text(line))
            if "-done(" in line or "-update(" in line:
                continue
            inside = Counter()
            for called in re.findall(r"(?:calls|to_apply|body|condition|computations?)=\{?((?:%[\w.-]+(?:, )?)+)", line):
                for other in re.findall(r"%([\w.-]+)", called):
                    inside.update(of(other))
            trips = 1
            if inside and " while(" in line:
                known = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
                if not known:
                    raise ValueError(f"collectives run in a loop whose trip count is not known: {line.strip()[:200]}")
                trips = int(known[1])
            found.update({collective: trips * count for collective, count in inside.items()})
        return found

    entry = re.search(r"^ENTRY %?([\w.-]+)", text, re.MULTILINE)
    return of(entry[1]) if entry else Counter()


def in_and_out_of_loops(compiled) -> tuple[list[Collective], list[Collective]]:
    """(those that run once, those in the body of a loop, however deep)."""
    text = compiled.as_text()
    bodies = computations(text)
    reached, todo = set(), re.findall(r"body=%?([\w.-]+)", text)
    while todo:
        if (name := todo.pop()) in bodies and name not in reached:
            reached.add(name)
            todo += re.findall(r"%([\w.-]+)", bodies[name])
    of = lambda chosen: of_text("\n".join(body for name, body in bodies.items() if (name in reached) == chosen))  # noqa: E731
    return of(False), of(True)


def collectives(compiled) -> list[Collective]:
    """Every collective instruction in the compiled text; an asynchronous pair counts once."""
    return of_text(compiled.as_text())


def of_text(text: str) -> list[Collective]:
    found = []
    for line in text.splitlines():
        if match := re.search(rf"= (.*?) ({KINDS})(-start)?\(", line):
            shapes = match[1]
            if match[2] == "all-gather" and match[3]:  # (operands, results)
                arrays = re.findall(r"\w+\[[\d,]*\]", shapes)
                shapes = " ".join(arrays[len(arrays) // 2:])
            found.append(Collective(match[2], bytes_of(shapes)))
    return found
