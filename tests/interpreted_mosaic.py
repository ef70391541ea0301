"""The Mosaic GPU kernels under JAX's interpreter. Run by tests/test_kernels.py, in a process of its own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from gumbeljax import _compat
from pallas_kernels import finish, mosaic, mosaic_kernel, mosaic_race, race, triton_filtered, triton_merge, vectors
from pallas_kernels.kept import Filters
from pallas_kernels.logits import Elementwise, canonical_temperature
from pallas_kernels.mosaic_tiles import PART, choose_tiles
from pallas_kernels.tiles import MosaicTiles
from tests import heads, oracles
from tests.speculative.test_search import check_scores
from tests.test_quantized import exact_quantized

plt, hopper = _compat.pallas_triton(), _compat.pallas_mosaic()


class Interpreted:
    """jax's module for its interpreter, which multiplies no registers: they go through shared memory here."""

    def __getattr__(self, name):
        return getattr(hopper, name)

    def kernel(self, body, *, scratch_types, num_threads, **options):
        def with_registers(*arguments, registers, **scratch):
            self.registers = registers
            body(*arguments, **scratch)

        _, ids, _ = scratch_types["w_smem"].shape
        registers = hopper.SMEM((num_threads, ids // (num_threads - 1), PART), scratch_types["h_smem"].dtype)
        return hopper.kernel(with_registers, scratch_types={**scratch_types, "registers": registers}, num_threads=num_threads,
                             **options)

    def wgmma(self, accumulator, a, b):
        if isinstance(a, jax.Array):
            registers = self.registers.at[lax.axis_index("wg")]
            registers[...] = a
            a = registers
        hopper.wgmma(accumulator, a, b)


mgpu = Interpreted()


def mosaic_stage1(h, w, words, t, options, *, vocab, vocab_axis=0, tiles=None, wanted="race", num_sms=1, sample=0,
                  **extra):
    """What the Mosaic GPU kernel returns under its interpreter, for the rows that exist."""
    with mgpu.force_gpu_interpret_mode(mgpu.InterpretGPUParams()):
        out = mosaic_kernel.launch(h, w, words, t, options, mgpu=mgpu, wanted=wanted, vocab=vocab, vocab_axis=vocab_axis,
                                   with_model=wanted == "race", tiles=tiles, num_sms=num_sms, sample=sample, **extra)
    return [x[:, :h.shape[0]] for x in out]


def mosaic_piece(h, w, words, t, options, *, vocab, sample=0, tiles=None, one_temperature=False, num_sms=1, **table):
    """Both stages, the second under Triton's interpreter."""
    tiles = tiles or choose_tiles(h.shape[0], vocab, table.get("vocab_axis", 0), num_sms, w.dtype.itemsize, h.shape[1])
    vectors = mosaic.vectors_for(h, t, words, tiles, one_temperature)
    high, low, top, total, model, winner, logits = mosaic_stage1(h, w, words, t, options, vocab=vocab, sample=sample,
                                                                 tiles=tiles, vectors=vectors, num_sms=num_sms, **table)
    return triton_merge.merge(words, t, race.Race(high, low, winner, top, total), model, logits, plt=plt, vocab=vocab,
                              sample=sample, vectors=vectors, interpret=True)


@pytest.mark.parametrize("vocab_axis, rows, num_sms, tiles", [
    (0, 5, 2, None), (1, 64, 1, MosaicTiles(False, 64, 64, 2)), (0, 140, 3, MosaicTiles(True, 96, 128, 2)),
    (0, 130, 4, MosaicTiles(True, 64, 64, 2, True)), (1, 130, 1, MosaicTiles(True, 128, 64, 2)),
    (0, 3, 2, MosaicTiles(False, 80, 64, 3)), (0, 9, 5, MosaicTiles(False, 64, 64, 2, pair_vocab=True)),
    (0, 70, 3, MosaicTiles(True, 64, 64, 2, pair_vocab=True)), (0, 200, 2, MosaicTiles(True, 112, 64, 2, True)),
    (0, 150, 2, MosaicTiles(True, 96, 64, 2, pair_vocab=True, warpgroups=3)),
    (0, 200, 2, MosaicTiles(True, 144, 64, 2, True)), (0, 128, 2, MosaicTiles(True, 64, 64, 2))])
def test_interpreted_mosaic_kernel_equals_the_oracle(vocab_axis, rows, num_sms, tiles):
    # 64 and 128 rows are whole tiles, the latter at one temperature: what is read of them is not packed. Behind the vocabulary
    # lie padding and, for the last of some twins, nothing: five whole tiles of 64.
    vocab, width = (320, 320) if rows == 70 else (509, 576)
    h, w = heads.exact_head(width, 128, rows, jnp.bfloat16, vocab_axis)
    _, words = heads.keys_of(9, rows)
    arrays = tuple(jnp.asarray(words.T))
    t = np.full(rows, 0.5) if rows == 128 else np.random.default_rng(0).choice([0.0, 1e-6, 0.5, 1.0, 2.0], rows)
    options = Elementwise(0.5, 6.0)
    table = {"vocab": vocab, "vocab_axis": vocab_axis, "tiles": tiles, "num_sms": num_sms}
    out = mosaic_piece(h, w, arrays, canonical_temperature(t), options, one_temperature=rows == 128, **table).draw
    laws = oracles.processed_logits(heads.exact_logits(h, w, vocab_axis), scale=0.5, soft_cap=6.0, valid_vocab=vocab)
    heads.assert_pathwise(out.token, laws.processed, words, t)
    i = np.arange(rows)
    tempered = oracles.log_softmax(laws.processed, t)[i, out.token]
    np.testing.assert_allclose(out.tempered_log_prob, tempered, rtol=1e-5, atol=2e-5)
    np.testing.assert_allclose(out.model_log_prob, oracles.log_softmax(laws.model)[i, out.token], atol=2e-5)
    top, total, argmax = mosaic_stage1(h, w, arrays, canonical_temperature(t), options, wanted="mass", **table)
    mass = race.merge_masses(race.Mass(top, argmax, total), canonical_temperature(t))
    np.testing.assert_array_equal(mass.argmax, laws.processed.argmax(-1))
    best, warm = laws.processed.max(-1), np.where(t == 0, 1.0, t)
    want = np.exp((laws.processed - best[:, None]) / warm[:, None]).sum(-1)
    np.testing.assert_allclose(np.asarray(mass.top), best, atol=1e-5)
    np.testing.assert_allclose(np.asarray(mass.total)[t > 0], want[t > 0], rtol=2e-5)


@pytest.mark.parametrize("dtype, h_dtype, rows, d_model, num_sms, tiles", [
    (jnp.int8, jnp.bfloat16, 5, 704, 2, MosaicTiles(False, 64, 64, 3)),  # eleven steps, two of them in a loop
    (jnp.int8, jnp.bfloat16, 40, 512, 1, MosaicTiles(False, 128, 256, 2)),
    (jnp.int8, jnp.bfloat16, 12, 128, 5, MosaicTiles(False, 64, 128, 3, pair_vocab=True)),
    (jnp.int8, jnp.float16, 130, 128, 3, MosaicTiles(True, 128, 64, 2)),
    (jnp.float8_e4m3fn, jnp.bfloat16, 200, 128, 4, MosaicTiles(True, 128, 128, 2, True)),
    (jnp.float8_e4m3fn, jnp.float16, 9, 128, 2, None),
    (jnp.float8_e4m3fn, jnp.bfloat16, 70, 896, 3, MosaicTiles(True, 128, 64, 2, pair_vocab=True))])
def test_interpreted_mosaic_kernel_of_8_bits_equals_the_oracle(dtype, h_dtype, rows, d_model, num_sms, tiles):
    # 509 tokens and padding; of 70 rows, twins of which the second finds nothing in its last turn.
    vocab, width = (384, 384) if rows == 70 else (509, 576)
    h, head, logits = exact_quantized(width, d_model, rows, dtype, h_dtype)
    _, words = heads.keys_of(9, rows)
    arrays = tuple(jnp.asarray(words.T))
    t = np.random.default_rng(0).choice([0.0, 0.5, 1.0, 2.0], rows)
    options, table = Elementwise(weight_scale=head.scale[:vocab]), {"vocab": vocab, "tiles": tiles, "num_sms": num_sms}
    out = mosaic_piece(h, head.qvalue, arrays, canonical_temperature(t), options, **table).draw
    logits = logits[:, :vocab]
    heads.assert_pathwise(out.token, logits, words, t)
    at_token = oracles.log_softmax(logits)[np.arange(rows), out.token]
    np.testing.assert_allclose(out.model_log_prob, at_token, atol=2e-5)
    top, total, argmax = mosaic_stage1(h, head.qvalue, arrays, canonical_temperature(t), options, wanted="mass", **table)
    mass = race.merge_masses(race.Mass(top, argmax, total), canonical_temperature(t))
    np.testing.assert_array_equal(mass.argmax, logits.argmax(-1))


@pytest.mark.parametrize("rows, num_sms, tiles", [
    (5, 2, MosaicTiles(False, 64, 64, 2)), (130, 2, MosaicTiles(True, 96, 64, 2)), (65, 3, MosaicTiles(True, 112, 64, 2)),
    (3, 1, MosaicTiles(False, 16, 64, 2)), (5, 2, MosaicTiles(False, 64, 64, 2, pair_vocab=True))])
def test_scores_of_the_tiles_equal_the_oracle(rows, num_sms, tiles):
    """Of each tile the best group and the second, whatever the tiles; the race beside them is the same with and without, and so
    is the draw, from logits of the winning group that are made again."""
    vocab = 509
    h, w = heads.exact_head(576, 64, rows, jnp.bfloat16)
    words = heads.keys_of(9, rows)[1]
    t = np.random.default_rng(0).choice([0.5, 1.0, 2.0], rows)
    call = functools.partial(mosaic_stage1, h, w, tuple(jnp.asarray(words.T)), canonical_temperature(t), Elementwise(),
                             vocab=vocab, tiles=tiles, num_sms=num_sms, sample=3)
    *plain, told = call(with_scores=True, with_logits=rows > 128)
    *kept, logits = call()
    if rows > 128:
        np.testing.assert_array_equal(plain.pop(), logits)
    for a, b in zip(plain, kept, strict=True):
        np.testing.assert_array_equal(a, b)
    mass = functools.partial(mosaic_stage1, h, w, (), canonical_temperature(t), Elementwise(), wanted="mass", vocab=vocab,
                             tiles=tiles, num_sms=num_sms)
    behind_others = vectors.Vectors(vectors.pack(canonical_temperature(np.concatenate([t[::-1] + 1, t])), spare=256))
    for a, b in zip(mass(), mass(vectors=behind_others, column=rows), strict=True):
        np.testing.assert_array_equal(a, b)
    high, low, top, total, _, winner = kept
    finish = functools.partial(triton_merge.merge, tuple(jnp.asarray(words.T)), canonical_temperature(t),
                               race.Race(high, low, winner, top, total), None, plt=plt, vocab=vocab, sample=3, interpret=True)
    one, two = finish(logits).draw, finish(triton_merge.Head(h, w, Elementwise(), 0)).draw
    np.testing.assert_array_equal(one.token, two.token)
    np.testing.assert_allclose(one.tempered_log_prob, two.tempered_log_prob, rtol=1e-6, atol=1e-6)
    want = oracles.group_scores(heads.exact_logits(h, w)[:, :vocab], words, t, sample=3)
    check_scores(race.Scores(told, tiles.vocab), want)


@pytest.mark.parametrize("vocab_axis, rows, num_sms, tiles", [
    (0, 5, 2, MosaicTiles(False, 80, 64, 3)), (1, 64, 1, MosaicTiles(False, 64, 64, 2)),
    (0, 130, 4, MosaicTiles(True, 64, 64, 2, True)), (0, 70, 3, MosaicTiles(True, 64, 64, 2, pair_vocab=True)),
    (0, 200, 2, MosaicTiles(True, 112, 64, 2, True))])
def test_stored_logits_are_summarised(vocab_axis, rows, num_sms, tiles):
    vocab, width = (320, 320) if rows == 70 else (509, 576)
    h, w = heads.exact_head(width, 128, rows, jnp.bfloat16, vocab_axis)
    t = np.random.default_rng(0).choice([0.5, 1.0, 2.0], rows)
    with mgpu.force_gpu_interpret_mode(mgpu.InterpretGPUParams()):
        got = mosaic.stage1_logits(h, w, canonical_temperature(t), Elementwise(0.5, 6.0), mgpu=mgpu, vocab=vocab,
                                   vocab_axis=vocab_axis, with_model=True, tiles=tiles, num_sms=num_sms)
    logits = heads.exact_logits(h, w, vocab_axis)
    np.testing.assert_array_equal(got.raw[:rows, :vocab], logits[:, :vocab])
    x = oracles.processed_logits(logits, scale=0.5, soft_cap=6.0, valid_vocab=vocab).model
    groups = -(-vocab // 16)
    padded = np.pad(x[:, :vocab], ((0, 0), (0, 16 * groups - vocab)), constant_values=-np.inf).reshape(rows, groups, 16)
    np.testing.assert_allclose(got.group_top[:rows, :groups], padded.max(-1), atol=1e-5)
    chosen = padded[:, np.arange(groups), mosaic_race.sample_of(np.arange(groups))]
    np.testing.assert_allclose(got.sample[:rows, :groups], chosen, atol=1e-5)
    for total, temperature in ((got.total, t), (got.model_total, np.ones(rows))):
        mass = race.mass_of(got.top[:, :rows], total[:, :rows], canonical_temperature(temperature))
        below = (padded - padded.max((1, 2), keepdims=True)) / temperature[:, None, None]
        np.testing.assert_allclose(mass[0], padded.max((1, 2)), atol=1e-5)
        np.testing.assert_allclose(mass[1], np.exp(below).sum((1, 2)), rtol=2e-5)


@pytest.mark.parametrize("soft_cap", [None, 6.0])
def test_filters_draw_from_stored_logits(soft_cap, monkeypatch):
    """The same tokens of the same kept sets as from the logits of XLA, to the last bit of a log-prob but for sums."""
    vocab, rows = 1000, 40
    h, w = heads.exact_head(vocab, 64, rows, jnp.bfloat16)
    words, t = tuple(jnp.asarray(heads.keys_of(2, rows)[1].T)), jnp.tile(jnp.array([0.0, 0.5, 1.0, 2.0]), rows // 4)
    k, p = np.tile([0, 5, 300, 0, 40], 8), np.tile([0.9, 1.0, 0.5, 0.2], 10)
    filters = Filters(jnp.asarray(k, jnp.int32), jnp.asarray(p, jnp.float32), jnp.full(rows, 0.01))
    draw = functools.partial(triton_filtered.draw, h, w, words, t, Elementwise(None, soft_cap), filters, plt=plt, vocab=vocab,
                             with_log_probs=True, interpret=True)
    stored = mosaic.stage1_logits

    def interpreted(*arguments, **options):
        with mgpu.force_gpu_interpret_mode(mgpu.InterpretGPUParams()):
            return stored(*arguments, **options)

    want, want_end = draw()
    monkeypatch.setattr(mosaic, "stage1_logits", interpreted)
    got, end = draw(mgpu=mgpu, num_sms=2)
    np.testing.assert_array_equal(got.token, want.token)
    np.testing.assert_array_equal(end.key, want_end.key)
    np.testing.assert_array_equal(end.id, want_end.id)
    for a, b in zip(got[1:], want[1:], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # the interpreter multiplies in NumPy
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_mosaic_marks_bad_rows(bad):
    h, w = heads.exact_head(512, 64, 3, jnp.bfloat16)
    words = tuple(jnp.asarray(heads.keys_of(0, 3)[1].T))
    t = jnp.array([0.0, 1.0, 0.3])
    out = mosaic_piece(h.at[1, 0].set(bad), w, words, t, Elementwise(), vocab=512).draw
    assert (np.asarray(out.token) == -1).tolist() == [False, True, False] and np.isnan(out.tempered_log_prob[1])
    top, total, _ = mosaic_stage1(h.at[1, 0].set(bad), w, words, t, Elementwise(), vocab=512, wanted="mass")
    mass = race.mass_of(top, total, t)
    assert np.asarray(finish.has_law(*mass)).tolist() == [True, False, True]


def test_vmap_of_mosaic():
    h, w = heads.exact_head(512, 64, 10, jnp.bfloat16)
    h, t = h.reshape(2, 5, 64), jnp.ones(5)
    words = jax.random.key_data(jax.random.split(jax.random.key(0), (2, 5)))

    def race_of(h, k):
        return mosaic_kernel.launch(h, w, (k[:, 0], k[:, 1]), t, Elementwise(), mgpu=mgpu, wanted="race", vocab=512,
                                    vocab_axis=0, with_model=False, tiles=None, num_sms=1)

    with mgpu.force_gpu_interpret_mode(mgpu.InterpretGPUParams()):
        mapped, single = jax.vmap(race_of)(h, words), [race_of(h[i], words[i]) for i in range(2)]
    for leaf, *alone in zip(mapped, *single, strict=True):
        np.testing.assert_array_equal(leaf[:, :, :5], jnp.stack(alone)[:, :, :5])


@pytest.mark.parametrize("sample", [3, 2 * 2**23])
def test_a_sample_draws_with_its_own_noise(sample):
    """Verification draws its candidates with the samples of another purpose."""
    h, w = heads.exact_head(512, 64, 40, jnp.bfloat16)
    _, words = heads.keys_of(2, 40)
    out = mosaic_piece(h, w, tuple(jnp.asarray(words.T)), jnp.ones(40), Elementwise(), vocab=512, sample=sample).draw
    logits = heads.exact_logits(h, w)
    heads.assert_pathwise(out.token, logits, words, sample=sample)
    np.testing.assert_allclose(out.tempered_log_prob, oracles.log_softmax(logits, np.ones(40))[np.arange(40), out.token],
                               atol=2e-5)


def test_a_shard_draws_with_the_noise_of_its_own_ids():
    """Two halves, the second with the id of its first token as a third key, merge to the race of the whole. What they send says
    what their leaves say, whose token is counted within the half."""
    h, w = heads.exact_head(512, 64, 5, jnp.bfloat16)
    h = h.at[3].set(jnp.nan)
    words, t = tuple(jnp.asarray(heads.keys_of(2, 5)[1].T)), jnp.ones(5)
    pieces = [mosaic_piece(h, w[first:first + 256], (*words, jnp.full(5, first, jnp.uint32)), t, Elementwise(), vocab=256)
              for first in (0, 256)]
    for first, piece in zip((0, 256), pieces, strict=True):
        numbers = finish.said(piece, jnp.int32(first), True)
        assert piece.words.shape == (len(numbers), 5) and piece.words[2, 3] == -1
        for sent, number in zip(piece.words, numbers, strict=True):
            np.testing.assert_array_equal(sent, lax.bitcast_convert_type(number, jnp.int32))
    halves = [piece.won for piece in pieces]
    halves[1] = halves[1]._replace(winner=race.to_global(halves[1].winner, 256))
    merged = race.merge(race.Race(*map(jnp.stack, zip(*halves, strict=True))), t)
    whole = mosaic_piece(h, w, words, t, Elementwise(), vocab=512).won
    np.testing.assert_array_equal(merged.winner, whole.winner)
    np.testing.assert_allclose(merged.high, whole.high, rtol=1e-6)
    assert {0, 1} == set(np.asarray(whole.winner)[[0, 1, 2, 4]] // 256)
