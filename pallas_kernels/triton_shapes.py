"""The shape of a call of `triton_filtered`, and what its kernels hand on to each other."""

from typing import Any, NamedTuple

from jax.experimental import pallas as pl

from pallas_kernels import noise
from pallas_kernels.kept import Kept

PIECE, BLOCK = 128, 128  # groups that a program reads at a time; those of one that only adds up
CHUNK = 256  # groups of which a program for a row draws at a time
LISTED = 256  # groups whose tokens a program holds in registers; it lists at least 3/8 as many, if there are
RANKED = 256  # tokens each of which is compared with each
STREAMED = 512  # groups that one of 16 warps reads at a time where it reads a whole row
WARPS_TO_SETTLE, WARPS_TO_CONCLUDE = 8, 16
LANES = 32 * WARPS_TO_SETTLE  # threads of a program that settles a row
IN_GAP = 8192  # tokens of a row that may lie in the gap
PROGRAMS = 1056  # that sweep pieces: as many as run at a time, for each that starts in vain takes time
DRAWN, SETTLED, IN_SPAN, WHOLE = range(4)


class Shape(NamedTuple):
    """What is fixed when a kernel is traced."""

    plt: Any
    vocab: int
    scale: float | None
    soft_cap: float | None
    dense: tuple[str, ...]
    num_keys: int
    filters: tuple[str, ...]
    with_model: bool
    interpret: bool

    @property
    def has_prefix(self) -> bool:
        """Whether a filter is there whose end has to be searched."""
        return "top_k" in self.filters or "top_p" in self.filters

    @property
    def num_groups(self) -> int:
        return pl.cdiv(self.vocab, noise.GROUP)

    @property
    def piece(self) -> int:
        """Groups of a piece."""
        return min(PIECE, pl.next_power_of_2(self.num_groups))

    @property
    def num_pieces(self) -> int:
        return pl.cdiv(self.num_groups, self.piece)

    @property
    def chunk(self) -> int:
        """Groups of a whole number of pieces."""
        return min(CHUNK, pl.next_power_of_2(self.num_groups))

    @property
    def in_gap(self) -> int:
        return min(IN_GAP, pl.next_power_of_2(noise.GROUP * self.num_groups))

    @property
    def block(self) -> int:
        return min(BLOCK, pl.next_power_of_2(self.num_groups))

    @property
    def num_blocks(self) -> int:
        return pl.cdiv(self.num_groups, self.block)

    @property
    def listed(self) -> int:
        return min(LISTED, pl.next_power_of_2(self.num_groups))


class Summary(NamedTuple):
    """Of the rows: `[blocks, rows]` and `[rows, groups]`; there may be more rows and groups than exist."""

    top: Any
    total: Any
    model_top: Any  # None without log-probs, as the next
    model_total: Any
    group_top: Any
    sample: Any  # None where nothing is to be searched


class State(NamedTuple):
    """What is known about each row, `[rows]`; the end of the prefix once it is settled."""

    kind: Any  # DRAWN: nothing is left to do; SETTLED: the race is; IN_SPAN: the end lies in a gap; WHOLE: anywhere
    top: Any
    total: Any
    low: Any  # keys between which the prefix ends; once it is settled, both are the least that may be kept
    high: Any
    end: Kept


class Sweep(NamedTuple):
    """Of the pieces, `[rows, pieces]`, and of the groups, `[rows, groups]`."""

    lower: Any  # largest score of a group, `exp((score - top) / T)`, to rounding: without the tokens in the gap, and with them
    upper: Any
    total: Any  # what is kept above the gap, relative to the largest logit of the row
    whole: Any  # the mass above the gap; None where nothing is to be searched, as the next
    fine: Any
    bits: Any  # which tokens lie in the gap


class Raced(NamedTuple):
    """As `race.Race`, and the kept mass relative to the largest logit of the row."""

    high: Any
    low: Any
    winner: Any
    total: Any


class Inputs(NamedTuple):
    """Refs that every kernel reads: raw logits f32 [rows, vocab]; what `pack` makes of temperatures, keys, filters; by token,
    or row and token, what `given` lists."""

    raw: Any
    by_row: Any
    dense: tuple
