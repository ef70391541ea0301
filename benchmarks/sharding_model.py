"""What a mesh should do to the time of a draw: waves of tiles on each device and bytes of the one collective.

    python -m benchmarks.sharding_model

A model, not a measurement. It counts the tiles of the Mosaic kernel's own table (`mosaic_tiles.choose_tiles`), which
its persistent programs, one on each multiprocessor, take in turns. The last turn may leave multiprocessors idle; a device that
is bound by its memory hides part of that, one that is bound by its products does not.
"""

from math import ceil
from typing import NamedTuple

from pallas_kernels.mosaic_tiles import choose_tiles

CORES = 132  # of an H200


class Waves(NamedTuple):
    """How the tiles of one shard fill a device."""

    tiles: int
    waves: int
    busy: float  # share of the turns in which a multiprocessor has a tile


def waves(vocab: int, shards: int, rows: int, cores: int = CORES) -> Waves:
    """The tiles of one of `shards` shards. Rows are those that each device sees; a program keeps its own.

    >>> waves(151_936, 1, 64)
    Waves(tiles=1187, waves=9, busy=0.9991582491582491)
    """
    tiles = choose_tiles(rows, ceil(vocab / shards), num_sms=cores)
    tall, wide = (128, tiles.vocab) if tiles.split_rows else (64, 2 * tiles.vocab)
    row_tiles, count = ceil(rows / tall), ceil(ceil(vocab / shards) / wide)
    turns = ceil(count / (cores // row_tiles))
    return Waves(count * row_tiles, turns, count * row_tiles / (turns * cores))


def bytes_received(rows: int, shards: int, per_row: int = 20) -> int:
    """What every device receives from the others in the all-gather of one draw.

    >>> bytes_received(256, 8)
    35840
    """
    return per_row * rows * (shards - 1)


def main() -> None:
    vocab = 151_936
    print(f"{vocab} ids, {CORES} multiprocessors\n\n| shards | rows | tiles | waves | busy | bytes received |")
    print("|---|---|---|---|---|---|")
    for shards in (1, 2, 4, 8):
        for rows in (64, 256):
            w = waves(vocab, shards, rows)
            print(f"| {shards} | {rows} | {w.tiles} | {w.waves} | {w.busy:.0%} | {bytes_received(rows, shards):,} |")


if __name__ == "__main__":
    main()
