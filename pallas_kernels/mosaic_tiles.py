"""How the Mosaic GPU kernel cuts its work: tiles and fetches in flight."""

from jax.experimental import pallas as pl

from pallas_kernels.tiles import MosaicTiles

NUM_SMS = 132  # multiprocessors of an H100 or H200; another number is right too, and slower
PART = 64  # coordinates of a table of 8 bits that are converted and multiplied at once


def most_steps(split_rows: bool, vocab: int, d_model: int, warpgroups: int = 2, itemsize: int = 2,
               num_rows: int = 256) -> int:
    """How many fetches fit into the shared memory of a multiprocessor, beside the results of few rows and logits of 8 bits."""
    rows, ids, memory = (64 * warpgroups, vocab, 226 * 1024) if split_rows else (64, 2 * vocab, 211 * 1024)
    if itemsize == 1:
        memory -= 4 * rows * ids
        rows = min(rows, pl.cdiv(num_rows, 16) * 16)  # others have no place
    return memory // ((2 * rows + itemsize * ids) * d_model)


def choose_steps(split_rows: bool, vocab: int, d_model: int, warpgroups: int = 2, itemsize: int = 2,
                 num_rows: int = 256) -> int:
    """As many as fit, up to 10, and no power of two: where the slots of a tile are the same in every turn, the compiler keeps
    the addresses of all of them, and registers spill."""
    steps = min(10, most_steps(split_rows, vocab, d_model, warpgroups, itemsize, num_rows))
    return steps - 1 if steps in (4, 8) else steps


def choose_tiles(num_rows: int, vocab: int, vocab_axis: int = 0, num_sms: int = NUM_SMS, itemsize: int = 2,
                 d_model: int = 64) -> MosaicTiles:
    """Tiles for an H200, where few rows were fastest with the first of these widths and many rows too.

    A program takes every n-th tile of the vocabulary, so it is the last turn, in which some programs have no tile, that decides
    between widths: the shard of a head may leave half of a turn empty. Of pairs of rows the time of a turn hardly depends on
    the width of its tile up to 128 ids; with 144, a step of drawing beside every second product, it took a fifth longer.
    (Slower on an H200: four programs that share rows and vocabulary both, of which it holds no more than 30 at once; four
    warpgroups that draw when they have multiplied; tiles of 192 and 256 ids in that way; fetching the table into the
    second-level cache ahead.)
    """
    split_rows = num_rows > 64
    # Of 129 to 192 rows two tiles of 128 would multiply 256.
    warpgroups = 3 if 128 < num_rows <= 192 and itemsize > 1 else 2
    row_tiles = pl.cdiv(num_rows, 64 * warpgroups) if split_rows else 1
    pair_rows = split_rows and row_tiles % 2 == 0
    if itemsize == 1:  # each warpgroup multiplies 64 ids
        widths = (128,) if split_rows else (64,)
    elif vocab_axis == 1:  # copied in boxes of 64 ids
        widths = (128, 64) if split_rows and warpgroups == 2 else (64,)
    elif pair_rows:
        widths = (128, 144)
    else:
        widths = (128, 112, 96, 80, 64)[2 * (warpgroups - 2):] if split_rows else (64, 48, 80, 96)

    def cost(width):
        tile = width if split_rows else 2 * width
        turns = pl.cdiv(pl.cdiv(vocab, tile), max(1, num_sms // row_tiles))
        if pair_rows:
            return turns * (1.2 if width > 128 else 1.0)
        return turns * (tile + (48 if split_rows else 0))

    least = min(map(cost, widths))
    width = next(width for width in widths if cost(width) <= (1.0 if pair_rows else 1.04) * least)
    # Lines of memory are fetched whole, 128 bytes. Of many rows products are what is waited for, and registers are short.
    coordinates = 128 if itemsize == 1 and not split_rows and d_model % 128 == 0 else 64
    steps = choose_steps(split_rows, width, coordinates, warpgroups, itemsize, num_rows)
    return MosaicTiles(split_rows, width, coordinates, steps, pair_rows, split_rows and not pair_rows, warpgroups)


def num_row_tiles(num_rows: int, tiles: MosaicTiles) -> int:
    """Of how many tiles of rows a program has one; pairs of them are whole."""
    together = 1 + tiles.pair_rows
    return pl.cdiv(num_rows, rows_of(tiles) * together) * together


def rows_of(tiles: MosaicTiles) -> int:
    """Of a tile of rows."""
    return 64 * tiles.warpgroups if tiles.split_rows else 64


def choose_pace(tiles: MosaicTiles, wanted: str, itemsize: int = 2) -> int:
    """Of how many products one has a step of drawing beside it.

    Where products are what is waited for, a step beside every third or second holds them up less. Three warpgroups have no
    registers for that, masses gain nothing, and 8 bits have instructions beside every product anyway.
    """
    if wanted != "race" or itemsize == 1 or tiles.warpgroups > 2 or not (tiles.pair_rows or tiles.pair_vocab):
        return 1
    return 3 if tiles.pair_rows and tiles.vocab <= 128 else 2
