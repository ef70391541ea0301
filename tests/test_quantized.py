"""Quantised heads: the law of the table `scale * qvalue`, the same token on every route, and what is refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gumbeljax
from gumbeljax import QuantizedHead, _compat, _implementation, autotuning, decode, processing, sharding, speculative
from pallas_kernels import many, triton, xla
from pallas_kernels.logits import Elementwise, canonical_temperature
from pallas_kernels.tiles import TritonTiles
from tests import heads, oracles
from tests.test_kernels import DEVICES, lower

plt = _compat.pallas_triton()
needs_triton = pytest.mark.skipif(plt is None, reason="this jax has no Pallas Triton backend")
DTYPES = [jnp.int8, jnp.float8_e4m3fn]
VOCAB, ROWS, D = 203, 9, 40
named = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: jnp.dtype(d).name)


def exact_quantized(vocab, d_model, rows, dtype, h_dtype=jnp.float32, seed=0):
    """(h, head, float64 logits): every number of the 8-bit type, h in {-1, 0, 1} and powers of two as scales, so that sums are
    exact in any order."""
    rng = np.random.default_rng(seed)
    h = rng.integers(-1, 2, (rows, d_model))
    bits = rng.integers(0, 256, (vocab, d_model), np.uint8)
    if dtype != jnp.int8:
        bits[(bits & 0x7F) == 0x7F] = 0x38  # NaN: 1 in its place
    q = bits.view(dtype)
    scale = 2.0 ** rng.integers(-10, -7, vocab)
    logits = h @ (q.astype(np.float64) * scale[:, None]).T
    return jnp.asarray(h, h_dtype), QuantizedHead(jnp.asarray(q), jnp.asarray(scale, jnp.float32)), logits


def table(head):
    """The same table in float32, exact for the heads of `exact_quantized`."""
    return head.qvalue.astype(jnp.float32) * head.scale[:, None]


@named
@pytest.mark.parametrize("vocab, rows, h_dtype", [(17, 3, jnp.float32), (203, 17, jnp.float16), (1009, 64, jnp.bfloat16)])
def test_every_route_draws_the_tokens_of_the_oracle(vocab, rows, h_dtype, dtype):
    h, head, logits = exact_quantized(vocab, D, rows, dtype, h_dtype)
    keys, words = heads.keys_of(vocab, rows)
    t = np.random.default_rng(0).choice([0.0, 0.5, 1.0, 2.0], rows).astype(np.float32)
    want = gumbeljax.sample_with_log_probs(h, head, keys, temperature=t, scale=0.5, soft_cap=9.0)
    laws = oracles.processed_logits(logits, scale=0.5, soft_cap=9.0)
    heads.assert_pathwise(want.token, laws.processed, words, t)
    i = np.arange(rows)
    np.testing.assert_allclose(want.tempered_log_prob, oracles.log_softmax(laws.processed, t)[i, want.token], atol=3e-5)
    np.testing.assert_allclose(want.model_log_prob, oracles.log_softmax(laws.model)[i, want.token], atol=3e-5)
    if plt is not None:
        out = triton.draw(h, head.qvalue, tuple(jnp.asarray(words.T)), canonical_temperature(t),
                          Elementwise(0.5, 9.0, weight_scale=head.scale), plt=plt, vocab=vocab, with_model=True, interpret=True)
        np.testing.assert_array_equal(out.token, want.token)
        np.testing.assert_allclose(out.model_log_prob, want.model_log_prob, atol=2e-5)
        np.testing.assert_allclose(out.tempered_log_prob, want.tempered_log_prob, atol=2e-5)


@needs_triton
@pytest.mark.parametrize("dtype, d_model, tiles", [
    (jnp.int8, 40, TritonTiles(64, 16, 32, 2)), (jnp.float8_e4m3fn, 48, TritonTiles(16, 16, 16)),
    (jnp.int8, 48, TritonTiles(128, 32, 64))])
def test_tiles_options_and_a_cut_vocabulary(dtype, d_model, tiles):
    """Row tiles, tails, dense options by row and by token, a table longer than its vocabulary, columns interleaved or not."""
    vocab, rows = 190, 40
    h, head, logits = exact_quantized(VOCAB, d_model, rows, dtype, jnp.bfloat16)
    _, words = heads.keys_of(3, rows)
    rng = np.random.default_rng(1)
    t = rng.choice([0.0, 1e-6, 1.0, 3.0], rows)
    given = {"logit_bias": rng.integers(-2, 3, (rows, VOCAB)).astype(np.float32), "mask": rng.random(VOCAB) < 0.6}
    options = Elementwise(2.0, None, jnp.asarray(given["logit_bias"])[:, :vocab], jnp.asarray(given["mask"])[:vocab],
                          weight_scale=head.scale[:vocab])
    table = {"plt": plt, "vocab": vocab, "tiles": tiles, "interpret": True}
    t32 = canonical_temperature(t)
    out = triton.draw(h, head.qvalue, tuple(jnp.asarray(words.T)), t32, options, **table)
    laws = oracles.processed_logits(logits, valid_vocab=vocab, scale=2.0, **given)
    heads.assert_pathwise(out.token, laws.processed, words, t)
    for twin, kernel in [(xla.stage1_mass, triton.stage1_mass), (xla.stage1_groups, triton.stage1_groups)]:
        want = twin(h, head.qvalue, t32, options, vocab=vocab)
        for a, b in zip(kernel(h, head.qvalue, t32, options, **table), want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)


COUNTS = gumbeljax.count_tokens(jnp.arange(ROWS * 5).reshape(ROWS, 5) * 7 % VOCAB, vocab=VOCAB)
OPTIONS = {
    "plain": {}, "temperatures": {"temperature": np.linspace(0, 2, ROWS)}, "scale and cap": {"scale": 0.7, "soft_cap": 5.0},
    "valid_vocab": {"valid_vocab": 150},
    "bias by row": {"logit_bias": np.linspace(-3, 3, ROWS * VOCAB, dtype=np.float32).reshape(ROWS, VOCAB)},
    "mask": {"mask": np.arange(VOCAB) % 3 > 0, "valid_vocab": 190}, "sparse bias": {"logit_bias": {3: 8.0}},
    "penalties": {"processors": processing.Processors(counts=COUNTS, repetition_penalty=1.3, presence_penalty=0.5)},
    "top_k": {"top_k": 7}, "top_p": {"top_p": 0.8, "temperature": 0.7}, "min_p": {"min_p": 0.1, "valid_vocab": 201},
    "several": {"num_samples": 4}, "distinct": {"num_samples": 6, "replace": False, "scale": 0.5},
    "categorical": {"method": "categorical"},
    "categorical kept": {"method": "categorical", "mode": "high", "top_k": 20, "scale": 0.3},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_see_the_table_that_it_stands_for(options):
    h, head, _ = exact_quantized(VOCAB, D, ROWS, DTYPES[len(options) % 2])
    key = jax.random.key(7)
    got, want = (gumbeljax.sample_with_log_probs(h, w, key, **options) for w in (head, table(head)))
    np.testing.assert_array_equal(got.token, want.token)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
    once = {k: v for k, v in options.items() if k not in ("num_samples", "replace", "method", "mode")}
    token, log_prob = ((x if x.ndim == 1 else x[:, 0]) for x in (want.token, want.processed_log_prob))
    np.testing.assert_allclose(gumbeljax.log_prob(h, head, token, **once), log_prob, atol=2e-5)


def test_whole_laws_and_the_greedy_token():
    h, head, logits = exact_quantized(VOCAB, D, ROWS, jnp.int8, jnp.bfloat16)
    law = gumbeljax.processed_log_probs(h, head, valid_vocab=150)
    np.testing.assert_allclose(law[:, :150], oracles.log_softmax(logits[:, :150]), atol=2e-5)
    assert law.shape == (ROWS, VOCAB) and (law[:, 150:] == -jnp.inf).all()
    np.testing.assert_array_equal(gumbeljax.greedy(h, head, valid_vocab=150), logits[:, :150].argmax(1))
    np.testing.assert_array_equal(gumbeljax.top_log_probs(h, head, 3).tokens[:, 0], logits.argmax(1))


@pytest.mark.parametrize("dtype, options", [(jnp.int8, {}), (jnp.float8_e4m3fn, {}), (jnp.float8_e4m3fn, {"top_k": 30})])
def test_gradients(dtype, options):
    """Those of the dense formula in h, temperature and bias; the table is a constant, whatever the route."""
    rng = np.random.default_rng(0)
    h = jnp.asarray(rng.normal(size=(ROWS, D)), jnp.float32)
    head = gumbeljax.quantize_head(rng.normal(size=(VOCAB, D)) * 0.3, dtype)
    tokens = gumbeljax.greedy(h, head)
    weights = jnp.linspace(-1, 2, ROWS)

    def value(h, t, bias, w):
        return jnp.sum(weights * gumbeljax.log_prob(h, w, tokens, temperature=t, logit_bias=bias, scale=0.7, soft_cap=5.0,
                                                    **options))

    arguments = (h, jnp.linspace(0.5, 2, ROWS), jnp.asarray(rng.normal(size=VOCAB) * 0.1, jnp.float32))
    got = jax.grad(value, (0, 1, 2))(*arguments, head)
    for a, b in zip(got, jax.grad(value, (0, 1, 2))(*arguments, table(head)), strict=True):
        np.testing.assert_allclose(a, b, atol=3e-5)
        assert np.abs(b).max() > 1e-3
    by_scale = jax.grad(lambda s: value(*arguments, head._replace(scale=s)))(head.scale)
    assert not by_scale.any()
    assert jax.grad(value)(h.astype(jnp.bfloat16), *arguments[1:], head).dtype == jnp.bfloat16


@named
def test_quantize_head(dtype):
    rng = np.random.default_rng(0)
    w = (rng.normal(size=(300, 64)) * 10.0 ** rng.integers(-30, 30, (300, 1))).astype(np.float32)
    w[7], w[8] = 0, 1e-39
    head = gumbeljax.quantize_head(w, dtype)
    largest = 127 if dtype == jnp.int8 else 448
    assert head.qvalue.dtype == dtype and head.scale.dtype == jnp.float32 and head.scale.shape == (300,)
    q, scale = np.asarray(head.qvalue).astype(np.float64), np.asarray(head.scale, np.float64)
    assert not q[[7, 8]].any() and (scale[[7, 8]] == 1).all()
    rest = np.delete(np.arange(300), [7, 8])
    assert (np.abs(q[rest]).max(1) == largest).all()
    np.testing.assert_allclose(scale[rest], np.abs(w[rest]).max(1) / largest, rtol=1e-6)
    # Half a step: 1 for int8; for float8 that of three bits, or of the subnormal numbers.
    step = np.ones_like(q) if dtype == jnp.int8 else 2.0 ** (np.maximum(np.floor(np.log2(np.maximum(np.abs(q), 2e-3))), -6) - 3)
    assert (np.abs(w / scale[:, None] - q)[rest] <= step[rest] * 0.5001).all()
    half = gumbeljax.quantize_head(jnp.asarray(w[rest], jnp.bfloat16), dtype)
    assert (half.qvalue == gumbeljax.quantize_head(jnp.asarray(w[rest], jnp.bfloat16).astype(jnp.float32), dtype).qvalue).all()
    traced = jax.jit(functools.partial(gumbeljax.quantize_head, dtype=dtype))(w)
    assert (traced.qvalue == head.qvalue).mean() > 0.999  # division may round otherwise


def test_a_bad_row_or_scale_marks_every_row_of_the_batch():
    h, head, _ = exact_quantized(VOCAB, D, ROWS, jnp.int8)
    h = h.at[:, 0].set(1)
    for bad in (head._replace(scale=head.scale.at[5].set(jnp.nan)),
                jax.jit(gumbeljax.quantize_head)(table(head).at[5, 0].set(jnp.nan)),
                jax.jit(lambda w: gumbeljax.quantize_head(w, jnp.float8_e4m3fn))(table(head).at[5, 0].set(jnp.inf)),
                QuantizedHead(head.qvalue.astype(jnp.float8_e4m3fn).at[5, 0].set(jnp.nan), head.scale)):
        assert gumbeljax.sample(h, bad, jax.random.key(0)).tolist() == [-1] * ROWS
        if plt is not None:
            words = tuple(jnp.asarray(heads.keys_of(0, ROWS)[1].T))
            out = triton.draw(h.astype(jnp.bfloat16), bad.qvalue, words, jnp.ones(ROWS), Elementwise(weight_scale=bad.scale),
                              plt=plt, vocab=VOCAB, interpret=True)
            assert out.token.tolist() == [-1] * ROWS


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class QArray:
    """Another library's: scales keep an axis of length 1, and there may be zero points."""

    qvalue: jax.Array
    scale: jax.Array
    zero_point: jax.Array | None = None


def test_another_librarys_arrays():
    h, head, _ = exact_quantized(VOCAB, D, ROWS, jnp.int8, jnp.bfloat16)
    other = QArray(head.qvalue, head.scale[:, None].astype(jnp.bfloat16))
    want = gumbeljax.sample(h, head, jax.random.key(0))
    np.testing.assert_array_equal(gumbeljax.sample(h, other, jax.random.key(0)), want)
    np.testing.assert_array_equal(jax.jit(gumbeljax.sample)(h, other, jax.random.key(0)), want)
    in_groups = jnp.stack([other.scale, other.scale * 2])
    got = jax.vmap(lambda s: gumbeljax.greedy(h, QArray(head.qvalue, s)))(in_groups)
    np.testing.assert_array_equal(got[1], gumbeljax.greedy(h, head))
    numpy = QuantizedHead(np.asarray(head.qvalue), np.asarray(head.scale))
    np.testing.assert_array_equal(gumbeljax.sample(h, numpy, jax.random.key(0)), want)


def test_speculative_verification_and_decoding_take_them():
    h, head, _ = exact_quantized(64, 16, 5, jnp.int8)
    h, drafts, key = h[None], jnp.array([[3, 9, 9, 1]]), jax.random.key(0)
    laws = [(speculative.Law(h, w), speculative.Law(h[:, :4] * 0.5, w)) for w in (head, table(head))]
    out = [speculative.verify(*pair, drafts, key) for pair in laws]
    jax.tree.map(np.testing.assert_array_equal, *out)

    def decode_fn(params, tokens, positions, cache):
        return params[tokens], cache

    embedding = jax.random.normal(jax.random.key(1), (64, 16))
    texts = [decode.generate(decode_fn, embedding, w, jnp.array([[5, 6]]), jnp.zeros((1, 1)), key, max_new_tokens=6,
                             repetition_penalty=1.2) for w in (head, table(head))]
    np.testing.assert_array_equal(texts[0].tokens, texts[1].tokens)


H, Q, S = jnp.zeros((2, 16)), jnp.zeros((100, 16), jnp.int8), jnp.ones(100)


@pytest.mark.parametrize("w, options, error, message", [
    (QuantizedHead(Q.astype(jnp.uint8), S), {}, TypeError,
     r"w\.qvalue must be int8 or float8_e4m3fn; got uint8: make w with gumbeljax\.quantize_head"),
    (QuantizedHead(Q.astype(jnp.float8_e5m2), S), {}, TypeError, r"w\.qvalue must be .*; got float8_e5m2: .*"),
    (QuantizedHead("x", S), {}, TypeError, r"w\.qvalue must be an array or a number; got str: .*"),
    (QuantizedHead(Q, None), {}, TypeError, r"w\.scale must be an array or a number; got NoneType: .*"),
    (QuantizedHead(Q, S.astype(jnp.int32)), {}, TypeError, r"w\.scale must be bfloat16, float16 or float32; got int32: .*"),
    (QuantizedHead(Q[0], S), {}, ValueError, r"w\.qvalue must be \[vocab, d_model\]; got shape \[16\]: .*"),
    (QuantizedHead(Q, S[:16]), {}, ValueError,
     r"w\.scale must be \[100\] or \[100, 1\], one number for each token of w\.qvalue \[100, 16\]; got \[16\]: make .*"),
    (QuantizedHead(Q, jnp.ones((100, 2))), {}, ValueError, r"w\.scale must be .*; got \[100, 2\]: .*"),
    (QuantizedHead(Q, jnp.float32(1)), {}, ValueError, r"w\.scale must be .*; got \[\]: .*"),
    (QArray(Q, S, zero_point=S), {}, ValueError, r"w\.zero_point must be None; got one: quantise w symmetrically, .*"),
    (QuantizedHead(Q, S), {"vocab_axis": 1}, ValueError,
     r"vocab_axis must be 0 for a quantised w, which is stored as \[vocab, d_model\]; got 1: quantise w\.T"),
    (QuantizedHead(Q.T, S), {}, ValueError, r"w\.scale must be \[16\] or \[16, 1\], .*"),
    (QuantizedHead(Q[:, :9], S), {}, ValueError, r"h must end in d_model = 9, .*"),
    (QuantizedHead(Q, S), {"valid_vocab": 101}, ValueError, r"valid_vocab must be between 1 and .*; got 101: .*"),
])
def test_what_is_refused(w, options, error, message):
    calls = [lambda: gumbeljax.sample(H, w, jax.random.key(0), **options), lambda: gumbeljax.greedy(H, w, **options),
             lambda: gumbeljax.log_prob(H, w, jnp.zeros(2, jnp.int32), **options),
             lambda: gumbeljax.choose_implementation(H, w, **options)]
    for call in calls:
        with pytest.raises(error, match=rf"^{message}\.$") as caught:
            call()
        assert ". " not in str(caught.value)


@pytest.mark.parametrize("arguments, error, message", [
    ((Q,), TypeError, r"w must be bfloat16, float16 or float32; got int8: .*"),
    ((S,), ValueError, r"w must be \[vocab, d_model\] with at least one token .*; got shape \[100\]: .*"),
    ((H[:, :0],), ValueError, r"w must be .*; got shape \[2, 0\]: .*"),
    ((H, jnp.int4), TypeError, r"dtype must be int8 or float8_e4m3fn; got int4: .*"),
    ((H, "int9"), TypeError, r"dtype must be int8 or float8_e4m3fn; got 'int9': .*"),
    ((H.at[1, 3].set(jnp.nan),), ValueError, r"w must be finite; got a NaN or an infinity: .*")])
def test_what_quantize_head_refuses(arguments, error, message):
    with pytest.raises(error, match=rf"^{message}\.$"):
        gumbeljax.quantize_head(*arguments)


@needs_triton
@named
@pytest.mark.parametrize("h_dtype, vocab, d_model, rows", [
    (jnp.bfloat16, 151_936, 4_096, 1), (jnp.bfloat16, 50_257, 768, 256), (jnp.float16, 50_257, 768, 32),
    (jnp.float32, 1_009, 3, 64)])
def test_the_kernels_lower(dtype, h_dtype, vocab, d_model, rows):
    shape = jax.ShapeDtypeStruct
    h, q, scale = shape((rows, d_model), h_dtype), shape((vocab, d_model), dtype), shape((vocab,), jnp.float32)
    words, t, mask = (shape((rows,), jnp.uint32),) * 2, shape((rows,), jnp.float32), shape((rows, vocab), jnp.bool_)
    arguments = {"plt": plt, "vocab": vocab, "precision": jax.lax.Precision.HIGHEST if h_dtype == jnp.float32 else None}

    def everything(h, q, scale, words, t, mask):
        options = Elementwise(0.5, 30.0, mask=mask, weight_scale=scale)
        top, total = triton.stage1_groups(h, q, t, options, **arguments)
        return (triton.draw(h, q, words, t, options, with_model=True, **arguments), triton.stage1_mass(h, q, t, **arguments),
                many.with_replacement(h, q, words, t, options, top, total, None, num_samples=2, vocab=vocab))

    text = lower(everything, DEVICES[0], h, q, scale, words, t, mask).as_text()
    assert text.count("__gpu$xla.gpu.triton") >= 4


@needs_triton
@pytest.mark.parametrize("rows, name", [(1, "triton"), (64, "mosaic")])
def test_the_public_functions_run_kernels(rows, name):
    shape = jax.ShapeDtypeStruct
    h, tokens = shape((rows, 128), jnp.bfloat16), shape((rows,), jnp.int32)
    heads_ = [QuantizedHead(shape((5120, 128), d), shape((5120,), jnp.float32)) for d in DTYPES]
    chosen = []

    def everything(h, w, tokens):
        chosen.append(gumbeljax.choose_implementation(h, w))
        key = jax.random.key(0)
        return (gumbeljax.sample(h, w, key), gumbeljax.sample_with_log_probs(h, w, key, num_samples=2), gumbeljax.greedy(h, w),
                jax.grad(lambda h: gumbeljax.log_prob(h, w, tokens).sum())(h))

    for w in heads_:
        assert name in lower(everything, DEVICES[0], h, w, tokens).as_text()
        named = lower(lambda h, w: gumbeljax.sample(h, w, jax.random.key(0), implementation="mosaic"), DEVICES[0], h, w)
        assert "mosaic" in named.as_text()
    with pytest.raises(NotImplementedError, match=r"it reads float8_e4m3fn from compute capability 8\.9 on"):
        lower(lambda h, w: gumbeljax.greedy(h, w, implementation="triton"), DEVICES[1], h, heads_[1])
    assert set(chosen) == {name}
    with pytest.raises(NotImplementedError, match=r"^implementation='mosaic' cannot run this call: it multiplies .*"):
        wide = shape((rows, 128), jnp.float32)
        lower(lambda h, w: gumbeljax.greedy(h, w, implementation="mosaic"), DEVICES[0], wide, heads_[0])


@needs_triton
@pytest.mark.parametrize("rows, vocab", [(2, 512), (39, 18_992)])
def test_verification_of_8_bits_lowers_through_mosaic(rows, vocab):
    """Its tiles are those of 8 bits; both heads have others in 16 bits."""
    shape = jax.ShapeDtypeStruct
    h, head = shape((rows, 5, 128), jnp.bfloat16), QuantizedHead(shape((vocab, 128), jnp.int8), shape((vocab,), jnp.float32))

    def verify(h, head):
        law = speculative.Law(h, head, implementation="mosaic")
        return speculative.verify(law, None, jnp.zeros((rows, 4), jnp.int32), jax.random.key(0)).tokens

    assert "mosaic" in lower(verify, DEVICES[0], h, head).as_text()


@needs_triton
@pytest.mark.parametrize("rows, name", [(16, "triton"), (17, "mosaic")])
def test_the_choice_on_a_hopper_gpu(rows, name):
    """A tile of Triton's kernel has 16 rows."""
    h, w = jax.ShapeDtypeStruct((rows, 128), jnp.bfloat16), jax.ShapeDtypeStruct((512, 128), jnp.int8)
    hopper = _implementation.DeviceFacts("gpu", (9, 0), 132, "NVIDIA H200")
    assert _implementation.choose(h, w, None, hopper) == name


def test_autotune_knows_them_from_other_tables():
    h, head, _ = exact_quantized(64, 16, 2, jnp.int8)
    tuning = gumbeljax.autotune(h, head, rounds=1)
    assert all(x.place.dtype == "float32 x int8" for x in tuning.shapes)
    assert gumbeljax.choose_implementation(h, head, tuning) == "xla"
    narrow = autotuning.near_triton(triton.default_tiles(16, 4096, jnp.bfloat16, jnp.int8), jnp.bfloat16, jnp.int8)
    assert {tiles.num_warps for tiles in narrow} == {2, 4, 8}


def test_padding_for_shards():
    head = sharding.pad_vocab(QuantizedHead(Q, S), 4)
    assert head.qvalue.shape == (128, 16) and head.scale.shape == (128,) and not head.scale[100:].any()
    with pytest.raises(ValueError, match=r"^vocab_axis must be 0 for a quantised w; got 1: leave it out\.$"):
        sharding.pad_vocab(head, 4, vocab_axis=1)
