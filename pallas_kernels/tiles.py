"""Tunables. They change speed, never a token."""

from dataclasses import dataclass

from jax import export

from pallas_kernels.noise import GROUP


def at_most(size, bound: int, *, if_unknown: bool) -> bool:
    """`size <= bound`; `if_unknown` where it is a symbol (`jax.export`), which may be any number."""
    return if_unknown if export.is_symbolic_dim(size) else size <= bound


@dataclass(frozen=True)
class XlaTiles:
    """`block` token ids are scored at a time (a multiple of 16)."""

    block: int = 2048

    def __post_init__(self):
        if self.block <= 0 or self.block % GROUP:
            raise ValueError(f"block must be a positive multiple of {GROUP}; got {self.block}.")


@dataclass(frozen=True)
class TritonTiles:
    """A program scores `vocab` ids for `rows` rows, `d_model` coordinates at a time (powers of two).

    `stored`: XLA makes the logits and stores them, and a program reads its own: for very few rows, whose product XLA streams
    best.
    """

    vocab: int = 64
    rows: int = 16
    d_model: int = 128
    num_warps: int = 4
    num_stages: int = 4
    stored: bool = False


@dataclass(frozen=True)
class MosaicTiles:
    """Warpgroups score 64 rows x `vocab` ids (a multiple of 16, at most 144) each, `d_model` coordinates at a time, with
    `steps` fetches in flight.

    `split_rows`: they share the ids and split the rows, `warpgroups` times 64; otherwise two share 64 rows and split the ids.
    `pair_rows`: two programs with neighbouring rows read each tile of the vocabulary once for both. `pair_vocab`: two with
    neighbouring tiles of the vocabulary read the rows once for both. Of 8 bits `vocab` is 128, or 64 too without `split_rows`.
    """

    split_rows: bool = False
    vocab: int = 128
    d_model: int = 64
    steps: int = 4
    pair_rows: bool = False
    pair_vocab: bool = False
    warpgroups: int = 2

    def __post_init__(self):
        most = {2: 144, 3: 96}.get(self.warpgroups, 0)  # what their registers hold
        if self.warpgroups != 2 and not (most and self.split_rows):
            raise ValueError(f"warpgroups must be 2, or 3 with split_rows; got {self.warpgroups}.")
        if self.vocab not in range(GROUP, most + 1, GROUP):
            raise ValueError(f"vocab must be a multiple of {GROUP} and at most {most}; got {self.vocab}.")
        if self.d_model not in (64, 128, 256) or self.steps < 2:
            raise ValueError(f"d_model must be 64, 128 or 256 and steps at least 2; got {self.d_model} and {self.steps}.")
        if self.pair_rows and (self.pair_vocab or not self.split_rows):  # four programs find no place on some multiprocessors
            raise ValueError("pair_rows must be False without split_rows, and with pair_vocab; got True.")
