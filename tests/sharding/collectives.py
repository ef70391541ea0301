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


def collectives(compiled) -> list[Collective]:
    """Every collective instruction in the compiled text; an asynchronous pair counts once."""
    found = []
    for line in compiled.as_text().splitlines():
        if match := re.search(rf"= (.*?) ({KINDS})(-start)?\(", line):
            found.append(Collective(match[2], bytes_of(match[1])))
    return found
