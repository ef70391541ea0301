"""The device's answers against the oracle: run wherever a GPU is visible. `GUMBELJAX_REPORT=file` appends its figures."""

import functools
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gumbeljax
from gumbeljax import _compat
from gumbeljax._implementation import precision_of
from pallas_kernels import kept, kept_set, mosaic, noise, triton, triton_filtered, xla
from pallas_kernels.logits import Elementwise
from pallas_kernels.tiles import MosaicTiles, TritonTiles, XlaTiles
from tests import filter_oracle, heads, knobs, oracles, statistics
from tests.test_quantized import exact_quantized

pytestmark = pytest.mark.gpu
IMPLEMENTATIONS = ("xla", "triton", "mosaic")
SHAPES = [(151_936, 4_096), (128_256, 8_192), (151_936, 2_048), (49_152, 576), (50_257, 768), (1_009, 64)]
ROWS = (1, 3, 16, 17, 64, 128, 256)


def runnable(h, w, **options):
    """The implementations that can run a call; Mosaic GPU takes 16-bit floats, whole TMA tiles and no bias or mask."""
    names = []
    for name in IMPLEMENTATIONS:
        try:
            names.append(gumbeljax.choose_implementation(h, w, name, **options))
        except NotImplementedError as reason:
            assert name == "mosaic", reason
    return names


def expect_mosaic(names, dtype, vocab, d_model):
    hopper = jax.devices()[0].compute_capability == "9.0"
    assert ("mosaic" in names) == (hopper and dtype == jnp.bfloat16 and vocab % 8 == 0 and d_model % 64 == 0)


def pinned(name, logits, dtype, rows):
    """A pinned head that the implementation can run."""
    return heads.pinned_head(logits, jnp.bfloat16 if name == "mosaic" else dtype, rows, d_model=64)


def report(**figures):
    if path := os.environ.get("GUMBELJAX_REPORT"):
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(figures) + "\n")


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("vocab_axis", [0, 1])
@pytest.mark.parametrize("vocab, d_model", SHAPES)
def test_pathwise_on_exact_inputs(vocab, d_model, vocab_axis, dtype):
    h, w = heads.exact_head(vocab, d_model, max(ROWS), dtype, vocab_axis)
    keys, words = heads.keys_of(1, max(ROWS))
    want = oracles.grouped_draw(heads.exact_logits(h, w, vocab_axis), words)
    nearest = np.minimum(want.group_gap, want.token_gap)
    differing, names = {}, runnable(h, w, vocab_axis=vocab_axis)
    expect_mosaic(names, dtype, vocab, d_model)
    for rows in ROWS:
        for name in names:
            got = np.asarray(gumbeljax.sample(h[:rows], w, keys[:rows], vocab_axis=vocab_axis, implementation=name))
            wrong = np.flatnonzero(got != want.tokens[:rows])
            differing[f"{name}/{rows}"] = len(wrong)
            assert np.all(nearest[wrong] < 1e-5), (name, rows, wrong[:9], nearest[wrong][:9])
    assert sum(differing.values()) <= 1, differing
    report(test="exact", vocab=vocab, d_model=d_model, vocab_axis=vocab_axis, dtype=jnp.dtype(dtype).name,
           rows=list(ROWS), implementations=names, differing=sum(differing.values()))


@pytest.mark.parametrize("kind", ["scale", "soft_cap", "quantised"])
@pytest.mark.parametrize("top_p", [None, 0.9])
def test_no_row_is_lost_at_tiny_temperatures(kind, top_p):
    """Logits that end in a multiplication: fused with a subtraction it would not round, and the top of a row not be its top."""
    rng = np.random.default_rng(0)
    h, w = (jnp.asarray(rng.normal(size=(n, 128)), jnp.bfloat16) for n in (64, 32_000))
    w = gumbeljax.quantize_head(w) if kind == "quantised" else w
    options = {"soft_cap": 7.3} if kind == "soft_cap" else {"scale": 0.3}
    t = jnp.asarray(rng.choice([0.0, 1e-20, 1e-8], 64), jnp.float32)
    for name in runnable(h, w, top_p=top_p):
        out = gumbeljax.sample_with_log_probs(h, w, jax.random.key(0), temperature=t, top_p=top_p, implementation=name,
                                              **options)
        assert np.all(np.asarray(out.token) >= 0) and np.all(np.asarray(out.tempered_log_prob) > -3), name


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("vocab, d_model", [(151_936, 2_048), (50_257, 768)])
def test_tiles_change_no_token(vocab, d_model, dtype):
    h, w = heads.exact_head(vocab, d_model, 64, dtype)
    keys, words = heads.keys_of(2, 64)
    words = (jnp.asarray(words[:, 0]), jnp.asarray(words[:, 1]))
    t, precision = jnp.ones(64), precision_of(None, dtype)
    plt = _compat.pallas_triton()
    want = np.asarray(gumbeljax.sample(h, w, keys, implementation="xla"))
    mgpu = _compat.pallas_mosaic()
    tiles = [MosaicTiles(False, 128, 64, 2), MosaicTiles(False, 64, 64, 8), MosaicTiles(True, 64, 64, 6),
             MosaicTiles(True, 128, 64, 4, True), MosaicTiles(True, 128, 128, 2)] if "mosaic" in runnable(h, w) else []
    tiles += [XlaTiles(1024), XlaTiles(65_536), TritonTiles(32, 16, 64), TritonTiles(128, 16, 32),
              TritonTiles(64, 64, 32, 4, 2), TritonTiles(256, 32, 32, 8, 2)]
    for tile in tiles:
        draw = {XlaTiles: xla.draw, TritonTiles: functools.partial(triton.draw, plt=plt),
                MosaicTiles: functools.partial(mosaic.draw, mgpu=mgpu, plt=plt)}[type(tile)]
        got = jax.jit(functools.partial(draw, vocab=vocab, precision=precision, tiles=tile))(h, w, words, t).token
        assert np.sum(np.asarray(got) != want) == 0, tile


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn], ids=["int8", "float8"])
def test_tables_of_8_bits_on_exact_inputs(dtype):
    h, head, logits = exact_quantized(32_064, 1_024, max(ROWS), dtype, jnp.bfloat16)
    keys, words = heads.keys_of(1, max(ROWS))
    names = runnable(h, head)
    assert ("mosaic" in names) == (jax.devices()[0].compute_capability == "9.0")
    for rows in ROWS:
        for name in names:
            got = gumbeljax.sample(h[:rows], head, keys[:rows], implementation=name)
            heads.assert_pathwise(got, logits[:rows], words[:rows])


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bf16", "f32"])
def test_real_inputs_differ_only_at_near_ties(name, dtype):
    vocab, d_model, rows, calls = 151_936, 2_048, 256, 48
    h = jax.random.normal(jax.random.key(0), (rows, d_model)).astype(dtype)
    w = (jax.random.normal(jax.random.key(1), (vocab, d_model)) * 2.0 / d_model**0.5).astype(dtype)
    if name not in runnable(h, w):
        pytest.skip(f"{name} does not run {jnp.dtype(dtype).name}")
    logits = np.asarray(jnp.matmul(h.astype(jnp.float32), w.astype(jnp.float32).T, precision="highest"))
    wrong = 0
    for call in range(calls):
        keys, words = heads.keys_of(call, rows)
        got = np.asarray(gumbeljax.sample(h, w, keys, implementation=name))
        want = oracles.grouped_draw(logits, words)
        bad = np.flatnonzero(got != want.tokens)
        assert np.all(np.minimum(want.group_gap, want.token_gap)[bad] < 1e-4), bad
        wrong += len(bad)
    report(test="real", implementation=name, dtype=jnp.dtype(dtype).name, rows=rows * calls, differing=wrong)
    assert wrong <= rows * calls * 1e-4 + 1


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_ten_million_draws(name):
    vocab, rows, calls = 128_000, 16_384, 611
    logits = np.random.default_rng(0).normal(size=vocab) * 1.5
    h, w = pinned(name, logits, jnp.float32, rows)

    @jax.jit
    def count(counts, key):
        tokens = gumbeljax.sample(h, w, jax.random.split(key, rows), implementation=name)
        return counts.at[tokens].add(1)

    counts = jnp.zeros(vocab, jnp.int32)
    for call in range(calls):
        counts = count(counts, jax.random.fold_in(jax.random.key(3), call))
    counts = np.asarray(counts)
    probs = np.exp(oracles.log_softmax(np.asarray(w[:, 0], np.float64)[None]))[0]
    p = statistics.chi_square(counts, probs / probs.sum())
    report(test="ten million draws", implementation=name, draws=int(counts.sum()), p=p)
    assert counts.sum() == rows * calls and p > statistics.ALPHA


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bf16", "f32"])
def test_one_percent_tail(name, dtype):
    """V = 49,152 with about 1% of the mass spread over all ids but one: `categorical` draws it 0.69% of the time."""
    rows, calls = 16_384, 16
    if name == "mosaic" and dtype != jnp.bfloat16:
        pytest.skip("mosaic does not run float32")
    h, w, tail = heads.tail_head(dtype, rows, d_model=64)
    draw = jax.jit(lambda key: gumbeljax.sample(h, w, jax.random.split(key, rows), implementation=name) != 77)
    hits = sum(int(draw(jax.random.fold_in(jax.random.key(4), i)).sum()) for i in range(calls))
    report(test="tail", implementation=name, dtype=jnp.dtype(dtype).name, draws=rows * calls, share=hits / rows / calls,
           want=tail)
    assert statistics.frequency_within(hits, rows * calls, tail, 3.0)


def test_noise_bits_on_the_device():
    k0, k1, index = (np.random.default_rng(i).integers(0, 2**32, 100_000, np.uint32) for i in range(3))
    stream = np.uint32(2**31 + 1)
    got = jax.jit(noise.threefry2x32)(k0, k1, jnp.full_like(index, stream), index)
    np.testing.assert_array_equal(np.stack(got), np.stack(oracles.threefry2x32(k0, k1, stream, index)))
    near = np.asarray(jax.jit(noise.gumbel)(k0, k1, jnp.full_like(index, stream), index))
    np.testing.assert_allclose(near, oracles.gumbel(k0, k1, stream, index), rtol=2e-6, atol=5e-7)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_rows_do_not_depend_on_the_batch(name):
    h, w = heads.exact_head(50_256, 768, 64, jnp.bfloat16)
    keys, _ = heads.keys_of(5, 64)
    whole = np.asarray(gumbeljax.sample(h, w, keys, implementation=name))
    alone = [int(gumbeljax.sample(h[i:i + 1], w, keys[i:i + 1], implementation=name)[0]) for i in range(64)]
    assert whole.tolist() == alone
    for bad in (0.0, 1e4, np.nan):  # neighbours change nothing, bit for bit
        other = gumbeljax.sample_with_log_probs(h.at[1:].set(bad), w, keys, implementation=name)
        same = gumbeljax.sample_with_log_probs(h, w, keys, implementation=name)
        for a, b in zip(other, same, strict=True):
            assert np.asarray(a)[0].tobytes() == np.asarray(b)[0].tobytes()


@pytest.mark.parametrize("name", ["xla", "triton"])
@pytest.mark.parametrize("vocab_axis", [0, 1])
def test_options_and_log_probs(name, vocab_axis):
    vocab, rows = 5_003, 33
    h, w = heads.exact_head(vocab, 256, rows, jnp.bfloat16, vocab_axis)
    keys, words = heads.keys_of(6, rows)
    rng = np.random.default_rng(0)
    t = rng.choice([0.0, 1e-6, 0.5, 1.0, 3.0], rows)
    options = {"scale": 0.5, "soft_cap": 4.0, "valid_vocab": 5_000, "mask": rng.random((rows, vocab)) < 0.7,
               "logit_bias": rng.integers(-3, 4, vocab).astype(np.float32)}
    logits = oracles.processed_logits(heads.exact_logits(h, w, vocab_axis), **options)
    out = gumbeljax.sample_with_log_probs(h, w, keys, temperature=t, vocab_axis=vocab_axis, implementation=name, **options)
    heads.assert_pathwise(out.token, logits.processed, words, t)
    i = np.arange(rows)
    tempered = oracles.log_softmax(logits.processed, t)[i, out.token]
    model = oracles.log_softmax(logits.model)[i, out.token]
    np.testing.assert_allclose(out.tempered_log_prob, tempered, rtol=1e-5, atol=2e-5)
    np.testing.assert_allclose(out.model_log_prob, model, rtol=1e-5, atol=2e-5)
    scored = gumbeljax.log_prob(h, w, out.token, temperature=t, vocab_axis=vocab_axis, implementation=name, **options)
    warm = t != 1e-6  # there the last bit of a logit, divided by T, is visible in the score of a token that ties the top
    np.testing.assert_allclose(np.asarray(scored)[warm], tempered[warm], rtol=1e-4, atol=2e-5)
    for replace in (True, False):
        many = gumbeljax.sample(h, w, keys, temperature=t, num_samples=5, replace=replace, vocab_axis=vocab_axis,
                                implementation=name, **options)
        want = (oracles.grouped_tokens(logits.processed, words, t, num_samples=5) if replace else
                oracles.grouped_without_replacement(logits.processed, words, 5, t))
        assert np.mean(np.asarray(many) != want) < 0.01


@pytest.mark.parametrize("vocab_axis", [0, 1])
@pytest.mark.parametrize("rows", [1, 65, 200])
def test_log_probs_of_mosaic(rows, vocab_axis):
    vocab = 5_056
    h, w = heads.exact_head(vocab, 256, rows, jnp.bfloat16, vocab_axis)
    if "mosaic" not in runnable(h, w, vocab_axis=vocab_axis):
        pytest.skip("not a Hopper GPU")
    keys, words = heads.keys_of(6, rows)
    t = np.random.default_rng(0).choice([0.0, 1e-6, 0.5, 1.0, 3.0], rows)
    table = {"vocab_axis": vocab_axis, "scale": 0.5, "soft_cap": 4.0, "valid_vocab": 5_050, "implementation": "mosaic"}
    model = oracles.processed_logits(heads.exact_logits(h, w, vocab_axis), scale=0.5, soft_cap=4.0, valid_vocab=5_050).model
    out, i = gumbeljax.sample_with_log_probs(h, w, keys, temperature=t, **table), np.arange(rows)
    heads.assert_pathwise(out.token, model, words, t)
    np.testing.assert_allclose(out.tempered_log_prob, oracles.log_softmax(model, t)[i, out.token], rtol=1e-5, atol=2e-5)
    np.testing.assert_allclose(out.model_log_prob, oracles.log_softmax(model)[i, out.token], atol=2e-5)
    scored = gumbeljax.log_prob(h, w, out.token, temperature=t, **table)
    tempered, warm = oracles.log_softmax(model, t)[i, out.token], t != 1e-6
    np.testing.assert_allclose(np.asarray(scored)[warm], tempered[warm], rtol=1e-4, atol=2e-5)
    np.testing.assert_array_equal(gumbeljax.greedy(h, w, **table), model.argmax(-1))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_bad_rows_are_marked(name):
    h, w = heads.exact_head(5_008, 256, 70, jnp.bfloat16)
    keys, _ = heads.keys_of(7, 70)
    clean = np.asarray(gumbeljax.sample(h, w, keys, implementation=name))
    h = h.at[3].set(jnp.nan).at[40, 0].set(jnp.inf)
    out = gumbeljax.sample_with_log_probs(h, w, keys, implementation=name)
    want = clean.copy()
    want[[3, 40]] = -1
    np.testing.assert_array_equal(out.token, want)
    assert np.isnan(np.asarray(out.tempered_log_prob)[[3, 40]]).all()


@pytest.mark.parametrize("precision, tolerance", [(None, 1e-4), ("highest", 1e-4), ("high", 1e-3), ("default", 0.1)])
@pytest.mark.parametrize("name", ["xla", "triton"])
def test_float32_is_multiplied_as_float32(name, precision, tolerance):
    rng = np.random.default_rng(0)
    h, w = rng.normal(size=(8, 1024)).astype(np.float32), rng.normal(size=(32_000, 1024)).astype(np.float32) / 8
    out = gumbeljax.sample_with_log_probs(h, w, jax.random.key(0), implementation=name, precision=precision)
    want = oracles.log_softmax(h.astype(np.float64) @ w.T.astype(np.float64))[np.arange(8), out.token]
    np.testing.assert_allclose(out.model_log_prob, want, atol=tolerance)


def test_gradient_of_log_prob_on_the_device():
    h, w = heads.exact_head(5_003, 64, 8)
    tokens = jnp.arange(8) * 600
    dense = lambda h, w: jax.nn.log_softmax(jnp.matmul(h, w.T, precision="highest"))[jnp.arange(8), tokens].sum()  # noqa: E731
    for name in runnable(h, w):
        ours = jax.grad(lambda h, w, name=name: gumbeljax.log_prob(h, w, tokens, implementation=name).sum(), (0, 1))(h, w)
        for got, want in zip(ours, jax.grad(dense, (0, 1))(h, w), strict=True):
            np.testing.assert_allclose(got, want, atol=2e-5)


@pytest.mark.parametrize("t", [1.0, 0.25])
@pytest.mark.parametrize("filters", [{"top_k": 50}, {"top_p": 0.9}, {"top_k": 50, "top_p": 0.9}, {"min_p": 0.05},
                                     {"top_k": 20_000}, {"top_k": 20_000, "top_p": 0.9}], ids=str)
def test_filters_keep_the_set_of_xla(filters, t):
    """Few and many tokens, ties by the hundred; a set may differ from XLA's by one token, whose mass rounding decides."""
    vocab, d_model, rows = 151_936, 2_048, 64
    h, w = heads.exact_head(vocab, d_model, rows, jnp.bfloat16)
    keys, words = heads.keys_of(8, rows)
    per_row = {name: jnp.full(rows, x, jnp.int32 if name == "top_k" else jnp.float32) for name, x in filters.items()}
    got, twin = (gumbeljax.sample_with_log_probs(h, w, keys, temperature=t, implementation=name, **per_row)
                 for name in ("triton", "xla"))
    x, t_row = jnp.asarray(heads.exact_logits(h, w)).T, jnp.full(rows, t)
    chosen = kept.Filters(**per_row)
    mgpu = _compat.pallas_mosaic() if "mosaic" in runnable(h, w) else None  # as `sample` does
    draw = functools.partial(triton_filtered.draw, plt=_compat.pallas_triton(), mgpu=mgpu, vocab=vocab)
    end = jax.jit(draw)(h, w, tuple(jnp.asarray(words.T)), t_row, Elementwise(), chosen)[1]
    ours = kept.is_kept(kept.ordered_keys(x), jnp.arange(vocab)[:, None], end)
    if "min_p" in filters:
        ours &= kept.is_above(x, t_row, jnp.max(x, axis=0), chosen.min_p)
    ours, theirs = np.asarray(ours).T, np.asarray(jax.jit(kept_set.kept_set)(x, t_row, chosen)).T
    differing = (ours != theirs).sum(1)
    report(test="kept set", filters=str(filters), temperature=t, sizes=[int(theirs.sum(1).min()), int(theirs.sum(1).max())],
           rows_differing=int((differing > 0).sum()), tokens_differing=int(np.sum(np.asarray(got.token) != twin.token)))
    knobs.assert_kept(ours[:4], np.asarray(x, np.float64).T[:4], filter_oracle.Options(t, **filters))
    assert differing.max() <= (1 if "top_p" in filters else 0)
    heads.assert_pathwise(got.token, np.where(ours, x.T, -np.inf), words, t)
    np.testing.assert_array_equal(got.token, twin.token)
    for a, b in zip(got, twin, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
    one = gumbeljax.sample(h[:1], w, keys[:1], temperature=t, implementation="triton", **filters)
    np.testing.assert_array_equal(one, got.token[:1])
