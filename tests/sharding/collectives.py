"""Collectives of a compiled function, read from its HLO."""

import math
import re
from typing import NamedTuple

SIZES = {"pred": 1, "s8": 1, "u8": 1, "s32": 4, "u32": 4, "f32": 4, "bf16": 2, "f16": 2, "s64": 8, "u64": 8, "f64": 8}
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


def in_and_out_of_loops(compiled) -> tuple[list[Collective], list[Collective]]:
    """(those that run once, those in the body of a loop, however deep)."""
    text = compiled.as_text()
    bodies = {match[1]: body for body in re.split(r"\n(?=\S)", text) if (match := re.match(r"(?:ENTRY )?%?([\w.-]+)", body))}
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
            found.append(Collective(match[2], bytes_of(match[1])))
    return found
