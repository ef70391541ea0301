"""Area D: batching, vmap, jit, loops; and what must not leak from row to row."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gumbeljax
from gumbeljax import _implementation, sampling
from tests import heads
from tests.cases import routes

NAN, INF = float("nan"), float("inf")


# D-1: a neighbour's content changes nothing, bit for bit


def replaced(h, keep, kind):
    """h with every row but `keep` replaced."""
    rng = np.random.default_rng(1)
    other = {
        "zeros": np.zeros(h.shape),
        "large": rng.normal(size=h.shape) * 1e4,
        "nan": np.full(h.shape, NAN),
        "inf": np.full(h.shape, INF),
    }[kind]
    return jnp.where(jnp.arange(h.shape[0])[:, None] == keep, h, jnp.asarray(other, h.dtype))


@jax.jit
def leaves_of(h, w, keys, t):
    """Everything that is known of a row after a draw."""
    one = gumbeljax.sample_with_log_probs(h, w, keys, temperature=t)
    several = gumbeljax.sample_with_log_probs(h, w, keys, temperature=t, num_samples=2)
    distinct = gumbeljax.sample_with_log_probs(h, w, keys, temperature=t, num_samples=2, replace=False)
    categorical = gumbeljax.sample_with_log_probs(h, w, keys, temperature=t, method="categorical")
    return (*one, *several, *distinct, *categorical, gumbeljax.greedy(h, w), gumbeljax.log_prob(h, w, one.token, temperature=t))


@pytest.mark.parametrize("keep", [0, 7, 15])
def test_neighbours_leave_a_row_alone_bit_for_bit(keep):
    rng = np.random.default_rng(0)
    h, w = (jnp.asarray(rng.normal(size=s) * 0.5, jnp.bfloat16) for s in [(16, 128), (4100, 128)])
    keys, t = routes.keys_of(0, 16), jnp.ones(16)
    want = [np.asarray(x)[keep] for x in leaves_of(h, w, keys, t)]
    assert not any(np.isnan(x).any() for x in want)
    bad_t = jnp.array([0.0, NAN, -1.0, INF, 1e-45, 1e30] * 3)[:16].at[keep].set(1.0)
    for kind in ("zeros", "large", "nan", "inf"):
        for neighbours_t in (t, bad_t):
            got = leaves_of(replaced(h, keep, kind), w, keys, neighbours_t)
            for a, b in zip(got, want, strict=True):
                np.testing.assert_array_equal(np.asarray(a)[keep], b)


@routes.needs_triton
def test_neighbours_leave_a_row_of_a_kernel_alone():
    """17 rows: two tiles of rows, one of them nearly empty."""
    rng = np.random.default_rng(2)
    h, w = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in [(17, 16), (100, 16)])
    keys = routes.keys_of(1, 17)
    draw = jax.jit(lambda h: routes.triton_draw(h, w, keys))
    want = draw(h)
    for keep, kind in [(0, "nan"), (15, "large"), (15, "nan"), (16, "nan")]:
        for a, b in zip(draw(replaced(h, keep, kind)), want, strict=True):
            np.testing.assert_array_equal(a[keep], b[keep])


def test_masks_and_biases_of_neighbours_leave_a_row_alone():
    h, w = heads.exact_head(200, 32, 4)
    keys = routes.keys_of(2, 4)
    mask, bias = np.ones((4, 200), bool), np.zeros((4, 200), np.float32)
    draw = jax.jit(lambda mask, bias: gumbeljax.sample_with_log_probs(h, w, keys, mask=mask, logit_bias=bias))
    want = draw(mask, bias)
    mask[0], bias[1], bias[3, 17] = False, -np.inf, np.nan
    got = draw(mask, bias)
    assert np.asarray(got.token)[[0, 1, 3]].tolist() == [-1, -1, -1]
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a[2], b[2])


# D-3: vmap equals a loop


B, D, V = 3, 16, 40
MIXES = [  # in_axes of h, w, key, temperature, bias, mask
    (0, None, None, None, None, None),
    (None, None, 0, None, 0, None),
    (0, None, 0, 0, None, None),
    (0, None, 0, 0, 0, 0),
    (None, None, None, 0, None, 0),
    (1, 2, 0, 0, 1, 0),
]


def operands(seed=0):
    rng = np.random.default_rng(seed)
    h = rng.integers(-2, 3, (B, D)).astype(np.float32)
    w = rng.integers(-2, 3, (B, V, D)).astype(np.float32) / 4
    bias = rng.integers(-2, 3, (B, V)).astype(np.float32) / 2
    mask = rng.random((B, V)) < 0.8
    return (
        [jnp.asarray(x) for x in (h, w)]
        + [routes.keys_of(seed, B), jnp.array([0.0, 0.7, 2.0])]
        + [jnp.asarray(x) for x in (bias, mask)]
    )


def everything(h, w, key, t, bias, mask):
    """All draws of one row, and their scores."""
    options = {"logit_bias": bias, "mask": mask}
    one = gumbeljax.sample_with_log_probs(h, w, key, temperature=t, **options)
    return (
        *one,
        gumbeljax.sample(h, w, key, temperature=t, num_samples=2, replace=False, **options),
        gumbeljax.sample(h, w, key, temperature=t, method="categorical", **options),
        gumbeljax.greedy(h, w, **options),
        gumbeljax.log_prob(h, w, one.token, temperature=t, **options),
    )


ONE = jax.jit(everything)


def loop(f, in_axes, arguments):
    def take(x, axis, i):
        return x if axis is None else x[i] if axis == 0 else jnp.take(x, i, axis=axis)

    rows = [f(*(take(x, axis, i) for x, axis in zip(arguments, in_axes, strict=True))) for i in range(B)]
    return [jnp.stack(parts) for parts in zip(*rows, strict=True)]


@pytest.mark.parametrize("in_axes", MIXES, ids=str)
def test_vmap_is_a_loop(in_axes):
    arguments = [
        x if axis == 0 else x[0] if axis is None else jnp.moveaxis(x, 0, axis)
        for x, axis in zip(operands(), in_axes, strict=True)
    ]
    if in_axes[3] is None:
        arguments[3] = jnp.float32(0.7)
    for got, want in zip(jax.jit(jax.vmap(everything, in_axes))(*arguments), loop(ONE, in_axes, arguments), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)  # ids are exact at this size, log-probs are sums


def test_vmap_of_vmap_and_of_batches_and_of_raw_keys():
    h, w, _, t, bias, mask = operands(1)
    keys = jax.random.split(jax.random.key(3), (2, B))
    both = jnp.stack([h, h[::-1]])
    draw = lambda h, k, t: gumbeljax.sample(h, w[0], k, temperature=t, logit_bias=bias[0], mask=mask[0])  # noqa: E731
    want = draw(both, keys, jnp.stack([t, t]))  # a batch of two axes
    np.testing.assert_array_equal(jax.vmap(jax.vmap(draw))(both, keys, jnp.stack([t, t])), want)
    np.testing.assert_array_equal(jax.vmap(jax.vmap(draw, (0, 0, 0)), (0, 0, None))(both, keys, t), want)
    np.testing.assert_array_equal(jax.vmap(draw)(both, keys, jnp.stack([t, t])), want)  # one axis mapped, one a batch
    raw = jax.random.key_data(keys)
    np.testing.assert_array_equal(jax.vmap(jax.vmap(draw))(both, raw, jnp.stack([t, t])), want)
    np.testing.assert_array_equal(
        jax.vmap(jax.vmap(draw, (None, 0, 0)), (None, 0, 0))(h[0], keys, jnp.stack([t, t])),
        [[int(draw(h[0], keys[i, j], t[j])) for j in range(B)] for i in range(2)],
    )


def test_vmap_over_one_key_per_batch_folds_inside():
    """Each mapped batch of rows gets one key: its rows use that key folded with their place in the batch."""
    h, w, keys, *_ = operands(2)
    batches = jnp.stack([h] * B)
    got = jax.vmap(lambda h, k: gumbeljax.sample(h, w[0], k))(batches, keys)
    np.testing.assert_array_equal(got, jnp.stack([gumbeljax.sample(h, w[0], k) for k in keys]))


# Control flow


def test_loops_with_an_int32_token_in_the_carry():
    w = jnp.asarray(np.random.default_rng(0).integers(-2, 3, (V, D)), jnp.float32)
    key, steps = jax.random.key(4), 8

    def next_token(token, i):
        return gumbeljax.sample(w[token], w, jax.random.fold_in(key, i), temperature=1.5)

    token, want = jnp.int32(1), []
    for i in range(steps):
        token = next_token(token, i)
        want.append(int(token))
    scanned = jax.lax.scan(lambda c, i: (next_token(c, i),) * 2, jnp.int32(1), jnp.arange(steps))[1]
    assert scanned.dtype == jnp.int32 and scanned.tolist() == want
    assert int(jax.lax.fori_loop(0, steps, lambda i, c: next_token(c, i), jnp.int32(1))) == want[-1]
    last = jax.lax.while_loop(lambda c: c[1] < steps, lambda c: (next_token(*c), c[1] + 1), (jnp.int32(1), 0))[0]
    assert int(last) == want[-1]
    branch = jax.lax.cond(True, lambda: next_token(jnp.int32(1), 0), lambda: jnp.int32(-7))
    assert int(branch) == want[0]
    mapped = jax.lax.map(lambda i: next_token(jnp.int32(1), i), jnp.arange(4), batch_size=2)
    assert mapped.tolist() == [int(next_token(jnp.int32(1), i)) for i in range(4)]


def test_new_values_compile_nothing():
    h, w = heads.exact_head(60, 16, 3)
    key = jax.random.key(0)
    gumbeljax.sample(h, w, key)
    size = sampling._draw._cache_size()
    for temperature in (0, 0.0, 1, 2.5, np.float64(0.3), np.float32(7), jnp.float32(1e-3), np.ones(3), jnp.zeros(3), [1, 2, 3]):
        gumbeljax.sample(h, w, key, temperature=temperature)
    for same in (jax.random.key(1), jax.random.PRNGKey(2), np.array([3, 4], np.uint32), routes.keys_of(0, 3)):
        gumbeljax.sample(h, w, same)
    gumbeljax.sample(
        np.asarray(h), np.asarray(w), key, vocab_axis=-2, valid_vocab=60, precision="highest", implementation="xla"
    )
    assert sampling._draw._cache_size() == size
    for bias in (np.zeros(60), jnp.ones(60, jnp.bfloat16), {3: 1.0}, {3: 1.0, 9: jnp.float32(2)}, {}):
        gumbeljax.sample(h, w, key, logit_bias=bias)
    assert sampling._draw._cache_size() == size + 1


EXPORTED = {
    "draw": lambda h, w, key: gumbeljax.sample_with_log_probs(h, w, key, temperature=0.7),
    "filters": lambda h, w, key: gumbeljax.sample(h, w, key, top_k=50, top_p=0.9),
    "several": lambda h, w, key: gumbeljax.sample(h, w, key, num_samples=3),
    "distinct": lambda h, w, key: gumbeljax.sample(h, w, key, num_samples=3, replace=False),
    "gradient": lambda h, w, key: jax.grad(lambda w: gumbeljax.log_prob(h, w, jnp.argmax(h, axis=1)).sum())(w),
}


@pytest.mark.parametrize("name", EXPORTED)
def test_export_for_any_batch(name):
    batch, = jax.export.symbolic_shape("b")
    h, w = heads.exact_head(60, 16, 5)
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((batch, 16), w.shape)]
    exported = jax.export.export(jax.jit(EXPORTED[name]))(*shapes, jax.eval_shape(lambda: jax.random.key(0)))
    for rows in (1, 5):
        got, want = (f(h[:rows], w, jax.random.key(3)) for f in (exported.call, EXPORTED[name]))
        chex.assert_trees_all_close(got, want, atol=1e-6)


def test_kernels_are_not_chosen_for_any_batch():
    hopper = _implementation.DeviceFacts("gpu", (9, 0), 132, "NVIDIA H200")
    h, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((*jax.export.symbolic_shape("b"), 128), (512, 128)))
    with pytest.warns(UserWarning, match="for one number of rows"):
        assert _implementation.plan(h, w, None, hopper).implementation == "xla"
    with pytest.raises(NotImplementedError, match="for one number of rows"):
        _implementation.plan(h, w, "triton", hopper)


def test_disable_jit_and_leak_checks():
    h, w = heads.exact_head(60, 16, 3)
    want = gumbeljax.sample(h, w, jax.random.key(0), temperature=0.7).tolist()
    with jax.disable_jit():
        assert gumbeljax.sample(h, w, jax.random.key(0), temperature=0.7).tolist() == want
    with jax.checking_leaks():
        assert jax.jit(lambda h: gumbeljax.sample(h, w, jax.random.key(0), temperature=0.7))(h).tolist() == want


# D-8: odd shapes and containers


def test_a_vocabulary_of_one():
    for draw in (routes.by_head, routes.by_logits, routes.by_distinct, routes.by_several, routes.by_categorical):
        token, log_prob = draw(np.float32([[3.0], [-1e30]]), routes.keys_of(0, 2), jnp.array([1.0, 0.0]))
        assert token.tolist() == [0, 0]
        if log_prob is not None:
            np.testing.assert_allclose(log_prob, 0.0, atol=1e-6)
    h, w = jnp.ones((2, 5)), jnp.ones((1, 5))
    np.testing.assert_allclose(gumbeljax.log_prob(h, w, jnp.zeros(2, jnp.int32)), 0.0, atol=1e-6)
    out = gumbeljax.sample_with_log_probs(h, w, jax.random.key(0), num_samples=1, replace=False)
    assert out.token.tolist() == [[0], [0]]
    np.testing.assert_allclose(out.tempered_log_prob, 0.0, atol=1e-6)


@pytest.mark.parametrize("batch", [(0,), (3, 0)])
def test_no_rows(batch):
    h, w = np.zeros((*batch, 8), np.float32), np.zeros((20, 8), np.float32)
    per_row = {"temperature": np.ones(batch), "mask": np.ones((*batch, 20), bool), "logit_bias": np.zeros((*batch, 20))}
    keys = jnp.zeros((*batch, 2), jnp.uint32)
    for key, more in [
        (jax.random.key(0), {}),
        (keys, {"method": "categorical"}),
        (keys, {"num_samples": 3}),
        (keys, {"num_samples": 3, "replace": False}),
    ]:
        out = gumbeljax.sample_with_log_probs(h, w, key, **per_row, **more)
        assert out.token.dtype == jnp.int32 and out.tempered_log_prob.dtype == jnp.float32
        assert all(x.shape == (batch if len(more) == 0 or "method" in more else (*batch, 3)) for x in out)
    assert gumbeljax.greedy(h, w).shape == gumbeljax.log_prob(h, w, np.zeros(batch, np.int32)).shape == batch
    with pytest.raises(ValueError, match=r"key must be one key or an array of keys"):
        gumbeljax.sample(h, w, routes.keys_of(0, 4))
    with pytest.raises(ValueError, match=r"h must end in d_model = 9"):
        gumbeljax.sample(h, np.zeros((20, 9), np.float32), jax.random.key(0))


def test_containers_and_layouts_are_one_array():
    """NumPy, lists, Fortran order, a transposed view, a slice with strides, a rank-three batch."""
    h, w = (np.asarray(x) for x in heads.exact_head(100, 16, 6))
    keys = routes.keys_of(0, 6)
    want = np.asarray(gumbeljax.sample(h, w, keys))
    draw = functools.partial(gumbeljax.sample, key=keys)
    for h2, w2, axis in [
        (jnp.asarray(h), jnp.asarray(w), 0),
        (h.tolist(), w.tolist(), 0),
        (np.asfortranarray(h), np.asfortranarray(w), 0),
        (h, w.T, 1),
        (h, np.ascontiguousarray(w.T), -1),
        (h.astype(np.float64), w.astype(np.float64), 0),
        (np.repeat(h, 2, 1)[:, ::2], np.repeat(w, 3, 0)[::3], -2),
    ]:
        np.testing.assert_array_equal(draw(h2, w2, vocab_axis=axis), want)
    for shape in [(2, 3), (1, 6, 1), (3, 1, 2)]:
        got = gumbeljax.sample(h.reshape(*shape, 16), w, keys.reshape(shape))
        np.testing.assert_array_equal(got, want.reshape(shape))
    np.testing.assert_array_equal([int(gumbeljax.sample(h[i], w, keys[i])) for i in range(6)], want)


@pytest.mark.parametrize("transposed", [False, True])
def test_vmap_of_a_bfloat16_table_in_the_other_layout(transposed):
    """The kernel of a Dense layer, [d_model, vocab]: XLA's CPU code has no such bfloat16 product when it is mapped."""
    h, w = heads.exact_head(1000, 64, 4, jnp.bfloat16, vocab_axis=1)
    keys = heads.keys_of(0, 4)[0]

    def draw(w, h, key):
        return gumbeljax.sample(h, w.T, key) if transposed else gumbeljax.sample(h, w, key, vocab_axis=1)

    mapped = jax.jit(jax.vmap(draw, (None, 0, 0)))(w, h, keys)
    np.testing.assert_array_equal(mapped, gumbeljax.sample(h, w, keys, vocab_axis=1))
    assert np.isfinite(jax.vmap(lambda h: gumbeljax.log_prob(h, w, jnp.int32(3), vocab_axis=1))(h)).all()
