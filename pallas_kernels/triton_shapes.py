"""The shape of a call of `triton_filtered`, and what its kernels hand on to each other."""

from typing import Any, NamedTuple

from jax.experimental import pallas as pl

from pallas_kernels import noise

BLOCK = 128  # groups of a program that only adds up
LISTED = 256  # leading groups, whose tokens a program holds in registers; it lists at least 3/8 as many, if there are
RANKED = 256  # tokens each of which is compared with each
STREAMED = 512  # groups that a program reads at a time where it reads many
IN_SPAN = 8192  # tokens of a row that may lie where its prefix is likely to end
WARPS = 8  # of the program of a row
LANES = 32 * WARPS


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
    def streamed(self) -> int:
        return min(STREAMED, pl.next_power_of_2(self.num_groups))

    @property
    def in_span(self) -> int:
        return min(IN_SPAN, pl.next_power_of_2(noise.GROUP * self.num_groups))

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


class Memory(NamedTuple):
    """Of the program of a row, int32 `[rows, n]`: groups that it lists; which of their tokens lie in a span, and these tokens,
    None where nothing is searched; and a few tokens."""

    groups: Any
    bits: Any
    in_span: Any
    few: Any
