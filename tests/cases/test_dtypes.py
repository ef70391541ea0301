"""Area F: dtypes and sizes."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gumbeljax
from tests import heads, statistics
from tests.cases import in_64_bit_mode as twin
from tests.cases import routes
from tests.cases.processes import run_python

# F-2: real sizes


SIZES = [(5, 1, 3), (1_009, 3, 33), (50_257, 64, 3), (256_000, 1, 1)]


@pytest.mark.parametrize("vocab, d_model, rows", SIZES)
def test_the_last_id_of_real_sizes(vocab, d_model, rows):
    """One-hot at the last id gives it, in both layouts; the mass of everything else is exactly nothing."""
    w = np.zeros((vocab, d_model), np.float32)
    w[-1, 0] = 200.0
    h = np.zeros((rows, d_model), np.float32)
    h[:, 0] = 1
    out = gumbeljax.sample_with_log_probs(h, w, jax.random.key(0))
    assert (out.token == vocab - 1).all()
    np.testing.assert_allclose(out.model_log_prob, 0.0, atol=1e-4)
    np.testing.assert_allclose(out.log_normalizer, 200.0, atol=1e-4)
    bf16 = gumbeljax.sample(h.astype(jnp.bfloat16), w.T.astype(jnp.bfloat16), jax.random.key(0), vocab_axis=1)
    assert (bf16 == vocab - 1).all()


@pytest.mark.parametrize("vocab", [5, 1_009])
def test_uniform_logits_reach_every_id_evenly(vocab):
    draws = 40 * vocab + 20_000
    h, w = jnp.zeros(3), jnp.zeros((vocab, 3))
    tokens = np.asarray(gumbeljax.sample(h, w, jax.random.key(1), num_samples=draws))
    counts = np.bincount(tokens, minlength=vocab)
    assert counts.size == vocab and counts.min() > 0
    assert statistics.chi_square(counts, np.full(vocab, 1 / vocab)) > statistics.ALPHA
    assert statistics.frequency_within(counts[-1], draws, 1 / vocab)


def test_the_short_last_group_of_a_real_size_is_as_frequent_as_others():
    """Its first id, its last id and its size have to be right: ids from 2048 before the end, where blocks end too."""
    vocab, draws = 50_257, 100_000
    tokens = np.asarray(gumbeljax.sample(jnp.zeros(3), jnp.zeros((vocab, 3)), jax.random.key(2), num_samples=draws))
    assert tokens.min() >= 0 and tokens.max() < vocab
    edges = np.array([0, 16, 2048, 4096, vocab // 2, vocab - 2048, vocab - vocab % 16, vocab])
    counts = np.histogram(tokens, edges)[0]
    assert statistics.chi_square(counts, np.diff(edges) / vocab) > statistics.ALPHA


def test_many_draws_of_one_wide_row_need_little_memory():
    """H-11's kind: what is gathered grows with d_model, so the number of samples at a time has to fall with it."""
    h, w = jax.ShapeDtypeStruct((1024,), jnp.float32), jax.ShapeDtypeStruct((256, 1024), jnp.float32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    draw = jax.jit(lambda h, w, key: gumbeljax.sample(h, w, key, num_samples=100_000))
    assert draw.lower(h, w, key).compile().memory_analysis().temp_size_in_bytes < 300e6


HARD_IDS = np.array([255, 257, 2049, 65_537, 131_071, 200_003, 262_143])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=lambda d: jnp.dtype(d).name)
def test_ids_are_never_rounded(dtype):
    """E-4's ids on one device: those that a float of 8, 11 or 24 bits would lose."""
    rows, vocab = len(HARD_IDS), 262_144
    h, w = routes.zeros_head(rows, vocab, dtype)
    mask = jnp.arange(vocab) == HARD_IDS[:, None]
    out = gumbeljax.sample_with_log_probs(h[:, :1], w[:, :1], jax.random.key(0), mask=mask)
    np.testing.assert_array_equal(out.token, HARD_IDS)
    np.testing.assert_allclose(out.tempered_log_prob, 0.0, atol=1e-5)
    np.testing.assert_allclose(out.model_log_prob, -np.log(vocab), atol=1e-4)
    np.testing.assert_array_equal(gumbeljax.sample(h[:, :1], w[:, :1], jax.random.key(0), mask=mask, temperature=0.0), HARD_IDS)


@routes.needs_triton
@pytest.mark.parametrize("vocab, d_model, rows", [(5, 1, 3), (203, 40, 18)])
def test_odd_sizes_in_a_kernel(vocab, d_model, rows):
    w = np.zeros((vocab, d_model), np.float32)
    w[-1, 0] = 200.0
    h = jnp.zeros((rows, d_model)).at[:, 0].set(1)
    draw = jax.jit(lambda h, w: routes.triton_draw(h, w, jax.random.key(0), vocab_axis=rows % 2))
    out = draw(h, w.T if rows % 2 else w)
    assert (out.token == vocab - 1).all()
    np.testing.assert_allclose(out.model_log_prob, 0.0, atol=1e-4)


# F-7: dtypes of results, with the 64-bit flag off and on


TOKENS = {"greedy": 1, "sample_logits": 1, "log_prob": 0}


def expected(name):
    """int32 for tokens, float32 for everything else."""
    if name == "empty":
        return ["int32", "float32"]
    if name in TOKENS:
        return ["int32" if TOKENS[name] else "float32"]
    return ["int32", "float32", "float32", "float32", "float32"]


def check_dtypes(report):
    for dtype in twin.NAMES:
        found = report["dtypes"][dtype]
        assert len(found) >= 5
        for name, got in found.items():
            assert got == expected(name), (dtype, name)
        assert report["gradients"][dtype] == [dtype, dtype]
    assert report["carry"][0] == "int32"
    assert report["others"] == ["int32", "int32", "int32", "float32"]


def test_dtypes_and_draws_do_not_depend_on_the_64_bit_flag():
    """F-7, and C-8: the same tokens from float32 logits, in a process with the flag on and in this one."""
    here, there = twin.report(), json.loads(run_python("-m", "tests.cases.in_64_bit_mode", JAX_ENABLE_X64="1"))
    assert there["enabled"] and not here["enabled"]
    check_dtypes(here)
    check_dtypes(there)
    assert here["carry"] == there["carry"] and here["draws"].keys() == there["draws"].keys() and len(here["draws"]) >= 4
    for name, tokens in here["draws"].items():
        assert tokens == there["draws"][name], name


# What is taken, and what is refused


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool", "complex64", "float8_e4m3fn", "float8_e5m2", "int4"])
def test_other_dtypes_are_refused(dtype):
    h, w = heads.pinned_head(np.zeros(20))
    for bad_h, bad_w, name in [(h.astype(dtype), w, "h"), (h, w.astype(dtype), "w")]:
        with pytest.raises(TypeError, match=rf"{name} must be bfloat16, float16 or float32; got {dtype}: cast it"):
            gumbeljax.sample(bad_h, bad_w, jax.random.key(0))
    with pytest.raises(TypeError, match=rf"logits must be bfloat16, float16 or float32; got {dtype}"):
        gumbeljax.sample_logits(jnp.zeros(4).astype(dtype), jax.random.key(0))


@pytest.mark.parametrize("h_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("w_dtype", ["float32", "bfloat16", "float16"])
def test_pairs_of_dtypes_draw_one_token(h_dtype, w_dtype):
    """Small integers are the same in all of them."""
    h, w = heads.exact_head(100, 16, 8)
    keys = routes.keys_of(0, 8)
    want = gumbeljax.sample_with_log_probs(h, w, keys)
    got = gumbeljax.sample_with_log_probs(h.astype(h_dtype), w.astype(w_dtype), keys)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)
    scores = [gumbeljax.log_prob(x, y, want.token) for x, y in ((h, w), (h.astype(h_dtype), w.astype(w_dtype)))]
    np.testing.assert_array_equal(*scores)
