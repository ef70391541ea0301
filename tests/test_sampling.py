"""`sample` and its siblings: pathwise against the oracle, in distribution against float64 softmax."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gumbeljax
from pallas_kernels import xla
from pallas_kernels.tiles import XlaTiles
from tests import heads, oracles, statistics

DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]


@pytest.mark.parametrize("vocab", [1, 2, 15, 16, 17, 31, 33, 1009, 4095, 4096, 4097, 8200])
@pytest.mark.parametrize("rows", [1, 17, 64])
def test_tokens_equal_the_oracle(vocab, rows):
    h, w = heads.exact_head(vocab, 64, rows, seed=vocab)
    keys, words = heads.keys_of(rows, rows)
    tokens = gumbeljax.sample(h, w, keys)
    assert tokens.dtype == jnp.int32 and tokens.shape == (rows,)
    heads.assert_pathwise(tokens, heads.exact_logits(h, w), words)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: jnp.dtype(d).name)
@pytest.mark.parametrize("vocab_axis", [0, 1])
def test_dtypes_and_layouts(dtype, vocab_axis):
    h, w = heads.exact_head(5003, 48, 32, dtype, vocab_axis)
    keys, words = heads.keys_of(0, 32)
    heads.assert_pathwise(gumbeljax.sample(h, w, keys, vocab_axis=vocab_axis), heads.exact_logits(h, w, vocab_axis), words)


def test_mixed_dtypes_round_neither_operand():
    h, w = heads.exact_head(2003, 48, 32)
    h = h * (1 + 2.0**-12)  # not a bfloat16 number
    keys, words = heads.keys_of(0, 32)
    heads.assert_pathwise(gumbeljax.sample(h, w.astype(jnp.bfloat16), keys), heads.exact_logits(h, w), words)


@pytest.mark.parametrize("block", [16, 48, 1024, 8192])
def test_blocks_change_no_token(block):
    h, w = heads.exact_head(2003, 64, 64)
    _, words = heads.keys_of(1, 64)
    words = tuple(jnp.asarray(words.T))
    t = jnp.linspace(0, 2, 64)

    def draw(tiles):
        return xla.draw(h, w, words, t, vocab=2003, precision=jax.lax.Precision.HIGHEST, tiles=tiles).token

    np.testing.assert_array_equal(draw(XlaTiles(block)), draw(XlaTiles(2016)))


def test_options_in_their_order():
    vocab, rows = 1003, 64
    h, w = heads.exact_head(vocab, 64, rows)
    keys, words = heads.keys_of(2, rows)
    rng = np.random.default_rng(0)
    t = rng.choice([0.0, 1e-30, 1e-3, 0.7, 1.0, 5.0, 1e30], rows)
    options = {"scale": 0.5, "soft_cap": 3.0, "valid_vocab": 1000, "mask": rng.random((rows, vocab)) < 0.6,
               "logit_bias": rng.normal(size=(rows, vocab)).astype(np.float32)}
    laws = oracles.processed_logits(heads.exact_logits(h, w), **options)
    out = gumbeljax.sample_with_log_probs(h, w, keys, temperature=t, **options)
    heads.assert_pathwise(out.token, laws.processed, words, t)
    np.testing.assert_array_equal(out.token, gumbeljax.sample(h, w, keys, temperature=t, **options))
    i = np.arange(rows)
    tempered = oracles.log_softmax(laws.processed, t)[i, out.token]
    np.testing.assert_allclose(out.tempered_log_prob, tempered, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(out.model_log_prob, oracles.log_softmax(laws.model)[i, out.token], atol=2e-5)
    normalizer = t * oracles.logsumexp(laws.processed / np.maximum(t, 1e-20)[:, None])
    normalizer = np.where(t < 1e-20, laws.processed.max(-1), normalizer)
    np.testing.assert_allclose(out.log_normalizer, normalizer, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("batch", [(), (1,), (5,), (2, 3), (0,), (3, 0)])
def test_leading_shapes(batch):
    h = jnp.ones((*batch, 8))
    w = heads.exact_head(100, 8, 1)[1]
    key = jax.random.key(0)
    assert gumbeljax.sample(h, w, key).shape == batch
    assert gumbeljax.sample(h, w, key, num_samples=4).shape == (*batch, 4)
    assert gumbeljax.greedy(h, w).shape == batch
    assert gumbeljax.log_prob(h, w, jnp.zeros(batch, jnp.int32)).shape == batch
    assert gumbeljax.sample_logits(jnp.zeros((*batch, 7)), key).shape == batch
    chex.assert_shape(gumbeljax.sample_with_log_probs(h, w, key), batch)


def test_one_key_is_folded_by_row():
    h, w = heads.exact_head(1000, 32, 6)
    key = jax.random.key(7)
    folded = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(6))
    whole = gumbeljax.sample(h, w, key)
    np.testing.assert_array_equal(whole, gumbeljax.sample(h, w, folded))
    np.testing.assert_array_equal(whole[:2], gumbeljax.sample(h[:2], w, key))
    np.testing.assert_array_equal(whole.reshape(2, 3), gumbeljax.sample(h.reshape(2, 3, 32), w, key))
    assert int(gumbeljax.sample(h[0], w, key)) == int(gumbeljax.sample(h[:1], w, key[None])[0])  # used as it is


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_every_kind_of_key(impl):
    h, w = heads.exact_head(1000, 32, 8)
    key = jax.random.key(3, impl=impl)
    whole = gumbeljax.sample(h, w, key)
    np.testing.assert_array_equal(whole[:3], gumbeljax.sample(h[:3], w, key))  # no dependence on the batch
    assert len(set(gumbeljax.sample(h[:1].repeat(64, 0), w, key).tolist())) > 20
    keys = jax.random.split(key, 8)
    np.testing.assert_array_equal(gumbeljax.sample(h, w, keys)[4:], gumbeljax.sample(h[4:], w, keys[4:]))


def test_raw_keys_are_typed_keys():
    h, w = heads.exact_head(1000, 32, 8)
    raw = jax.random.PRNGKey(3)
    np.testing.assert_array_equal(gumbeljax.sample(h, w, raw), gumbeljax.sample(h, w, jax.random.key(3)))
    np.testing.assert_array_equal(gumbeljax.sample(h, w, np.asarray(raw)), gumbeljax.sample(h, w, raw))


def test_greedy_is_sample_at_zero():
    h, w = heads.exact_head(4099, 64, 64)
    want = heads.exact_logits(h, w).argmax(-1)
    np.testing.assert_array_equal(gumbeljax.greedy(h, w), want)
    np.testing.assert_array_equal(gumbeljax.sample(h, w, jax.random.key(0), temperature=0.0), want)


def test_sample_logits_is_the_same_law_and_path():
    h, w = heads.exact_head(3001, 64, 64)
    logits = heads.exact_logits(h, w)
    keys, _ = heads.keys_of(0, 64)
    t = np.linspace(0, 2, 64)
    want = gumbeljax.sample(h, w, keys, temperature=t)
    np.testing.assert_array_equal(gumbeljax.sample_logits(logits, keys, temperature=t), want)


@pytest.mark.parametrize("method", ["grouped", "categorical"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_law(method, temperature):
    """Chi-square, the 10,000-sample Kolmogorov-Smirnov gate at 1%, and a 5,000-sample chi-square, over group borders."""
    rows = 100_000
    logits = np.random.default_rng(1).normal(size=50) * 1.5
    h, w = heads.pinned_head(logits, rows=rows)
    keys, _ = heads.keys_of(3, rows)
    tokens = np.asarray(gumbeljax.sample(h, w, keys, temperature=temperature, method=method))
    probs = np.exp(oracles.log_softmax(np.asarray(w[:, 0])[None], temperature))[0]
    assert statistics.chi_square(np.bincount(tokens, minlength=50), probs) > statistics.ALPHA
    assert statistics.g_test(np.bincount(tokens, minlength=50), probs) > statistics.ALPHA
    assert statistics.chi_square(np.bincount(tokens[:5000], minlength=50), probs) > statistics.ALPHA
    assert statistics.ks_gate(tokens, probs)


def test_score_minus_log_normalizer_is_gumbel():
    rows = 20_000
    h, w = heads.pinned_head(np.random.default_rng(1).normal(size=100), rows=rows)
    words = jax.random.key_data(heads.keys_of(4, rows)[0])
    won, _ = xla.stage1(h, w, (words[:, 0], words[:, 1]), jnp.ones(rows), vocab=100)
    assert statistics.gumbel_ks(won.high + won.low - won.top - jnp.log(won.total)) > statistics.ALPHA


@pytest.mark.parametrize("offset", [0.0, 1000.0, 2.0**20])
@pytest.mark.parametrize("temperature", [1.0, 1e-3, 1e-6, 1e-20])
def test_equal_maxima_share_evenly_at_any_temperature_and_offset(offset, temperature):
    """Noise must survive the addition: `l + T * G` in float32 would give the lowest id nearly always."""
    logits = np.full(40, -2.0**23)
    logits[[3, 5, 37]] = offset
    h, w = heads.pinned_head(logits, rows=6000)
    tokens = np.asarray(gumbeljax.sample(h, w, jax.random.key(5), temperature=temperature))
    assert statistics.chi_square(np.bincount(tokens, minlength=40)[[3, 5, 37]], np.ones(3) / 3) > statistics.ALPHA


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_one_percent_tail(dtype):
    """49,152 ids, about 1% of the mass on all but one: float32 `categorical` draws the tail 0.69% of the time."""
    rows, calls = 512, 400
    h, w, tail = heads.tail_head(dtype, rows)
    assert 0.00989 < tail < 0.00991
    draw = jax.jit(lambda key: jnp.sum(gumbeljax.sample(h, w, jax.random.split(key, rows)) != 77))
    hits = sum(int(draw(jax.random.fold_in(jax.random.key(4), i))) for i in range(calls))
    assert statistics.frequency_within(hits, rows * calls, tail, 3.0), hits / rows / calls


def test_memory_is_a_block_not_the_logits():
    rows, vocab, d_model = 64, 65_536, 32
    shapes = jax.ShapeDtypeStruct((rows, d_model), jnp.float32), jax.ShapeDtypeStruct((vocab, d_model), jnp.float32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    compiled = jax.jit(gumbeljax.sample).lower(*shapes, key).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.5 * rows * vocab * 4


def test_a_loop_compiles_once():
    h, w = heads.exact_head(300, 16, 4)

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(h, key, t, bias, mask):
        return gumbeljax.sample(h, w, key, temperature=t, logit_bias=bias, mask=mask)

    for i in range(4):
        step(h, jax.random.key(i), jnp.full(4, float(i)), jnp.full(300, float(i)), jnp.arange(300) % (i + 1) == 0)
