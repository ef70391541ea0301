"""What the Mosaic GPU kernel offers: a draw, the draw of a shard, the mass of a vocabulary, and logits that are stored."""

from typing import Any, NamedTuple

from pallas_kernels import race, triton_merge
from pallas_kernels.finish import Draw, Piece
from pallas_kernels.logits import Elementwise
from pallas_kernels.mosaic_kernel import launch
from pallas_kernels.mosaic_tiles import NUM_SMS, choose_tiles, num_row_tiles, rows_of
from pallas_kernels.tiles import MosaicTiles
from pallas_kernels.triton_merge import Head
from pallas_kernels.vectors import Vectors, vectors_of


def vectors_for(h, t, keys, tiles: MosaicTiles, one_temperature: bool) -> Vectors:
    """What both stages read of the rows of h."""
    return vectors_of(t, keys, one_temperature=one_temperature, rows_read=num_row_tiles(h.shape[0], tiles) * rows_of(tiles))


def piece(h, w, keys, t, options=Elementwise(), *, mgpu, plt, vocab, sample=0, vocab_axis=0, precision=None,
          with_model=False, tiles=None, num_sms=NUM_SMS, one_temperature=False) -> Piece:
    """As `xla.piece`. `mgpu` and `plt` are jax's Mosaic GPU and Triton modules: the finish is a Triton kernel.
    `one_temperature`: t is one number, broadcast."""
    del precision  # products of 16-bit floats are exact in float32
    tiles = tiles or choose_tiles(h.shape[0], vocab, vocab_axis, num_sms, w.dtype.itemsize, h.shape[1])
    vectors = vectors_for(h, t, keys, tiles, one_temperature)
    high, low, top, total, *model, winner, logits = launch(
        h, w, keys, t, options, mgpu=mgpu, wanted="race", vocab=vocab, vocab_axis=vocab_axis, with_model=with_model,
        tiles=tiles, num_sms=num_sms, sample=sample, vectors=vectors)
    return triton_merge.merge(keys, t, race.Race(high, low, winner, top, total), model[0] if with_model else None, logits,
                              plt=plt, vocab=vocab, sample=sample, vectors=vectors)


def race_pieces(h, w, keys, t, options=Elementwise(), *, mgpu, vocab, vectors, sample=0, vocab_axis=0, precision=None,
                tiles=None, num_sms=NUM_SMS) -> tuple[race.Race, race.Scores]:
    """What the pieces of the vocabulary say, `[pieces, rows and padding]`, and the scores of their groups."""
    del precision
    tiles = tiles or choose_tiles(h.shape[0], vocab, vocab_axis, num_sms, w.dtype.itemsize, h.shape[1])
    high, low, top, total, winner, told = launch(
        h, w, keys, t, options, mgpu=mgpu, wanted="race", vocab=vocab, vocab_axis=vocab_axis, with_model=False, tiles=tiles,
        num_sms=num_sms, sample=sample, with_scores=True, with_logits=False, vectors=vectors)
    return race.Race(high, low, winner, top, total), race.Scores(told, tiles.vocab)


def scored_piece(h, w, keys, t, options=Elementwise(), *, mgpu, plt, vocab, sample=0, vocab_axis=0, precision=None,
                 tiles=None, num_sms=NUM_SMS, one_temperature=False) -> tuple[Piece, race.Scores]:
    """As `xla.scored_piece`; other arguments as in `piece`."""
    del precision
    tiles = tiles or choose_tiles(h.shape[0], vocab, vocab_axis, num_sms, w.dtype.itemsize, h.shape[1])
    vectors = vectors_for(h, t, keys, tiles, one_temperature)
    # To make them again takes less memory than to keep them, and with few rows no more time.
    with_logits = h.shape[0] > 128 or options.weight_scale is not None
    high, low, top, total, winner, *logits, told = launch(
        h, w, keys, t, options, mgpu=mgpu, wanted="race", vocab=vocab, vocab_axis=vocab_axis, with_model=False,
        tiles=tiles, num_sms=num_sms, sample=sample, with_scores=True, with_logits=with_logits, vectors=vectors)
    of_winner = logits[0] if with_logits else Head(h, w, options, vocab_axis)
    drawn = triton_merge.merge(keys, t, race.Race(high, low, winner, top, total), None, of_winner, plt=plt, vocab=vocab,
                               sample=sample, vectors=vectors)
    return drawn, race.Scores(told, tiles.vocab)


def draw(*arguments, **options) -> Draw:
    """As `xla.draw`; arguments as in `piece`."""
    return piece(*arguments, **options).draw


class Logits(NamedTuple):
    """Stored logits, and what is known about their groups and rows; rows and ids may be padded."""

    raw: Any  # [rows, ids]; of 8 bits, with the scales of their ids
    group_top: Any  # [rows, groups]: the largest processed logit
    sample: Any  # [rows, groups]: that of `sample_of`
    top: Any  # [pieces of the vocabulary, rows]
    total: Any  # sum exp((l - top) / T)
    model_total: Any  # sum exp(l - top), or None


def stage1_logits(h, w, t, options=Elementwise(), *, mgpu, vocab, vocab_axis=0, with_model=False, tiles=None,
                  num_sms=NUM_SMS) -> Logits:
    """The logits, for whoever looks for the kept set of filters."""
    top, total, *model, raw, group_top, sample = launch(
        h, w, None, t, options, mgpu=mgpu, wanted="logits", vocab=vocab, vocab_axis=vocab_axis, with_model=with_model,
        tiles=tiles, num_sms=num_sms)
    return Logits(raw, group_top, sample, top, total, model[0] if with_model else None)


def mass_pieces(h, w, t, options=Elementwise(), *, mgpu, vocab, vocab_axis=0, precision=None, tiles=None, num_sms=NUM_SMS,
                vectors=None, column=0) -> race.Mass:
    """The masses of the pieces of the vocabulary, `[pieces, rows and padding]`."""
    del precision
    top, total, argmax = launch(h, w, None, t, options, mgpu=mgpu, wanted="mass", vocab=vocab, vocab_axis=vocab_axis,
                                with_model=False, tiles=tiles, num_sms=num_sms, vectors=vectors, column=column)
    return race.Mass(top, argmax, total)


def stage1_mass(h, w, t, options=Elementwise(), *, plt, vocab, vocab_axis=0, tiles=None, num_sms=NUM_SMS,
                one_temperature=False, **shape) -> race.Mass:
    """As `xla.stage1_mass`: Mass of the processed law, each leaf `[rows]`; other arguments as in `piece`."""
    tiles = tiles or choose_tiles(h.shape[0], vocab, vocab_axis, num_sms, w.dtype.itemsize, h.shape[1])
    vectors = vectors_for(h, t, (), tiles, one_temperature)
    pieces = mass_pieces(h, w, t, options, vocab=vocab, vocab_axis=vocab_axis, tiles=tiles, num_sms=num_sms, vectors=vectors,
                         **shape)
    return triton_merge.merge_masses(pieces, t, plt=plt, vectors=vectors)
