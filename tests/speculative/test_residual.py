"""The pass over two tables: its GPU kernel against the plain one, and what verification takes of memory."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

import gumbeljax
from gumbeljax import _compat
from gumbeljax.speculative import Law, verify, verify_chains
from gumbeljax.speculative.verify import verify_one
from pallas_kernels import dual, triton_dual
from pallas_kernels.logits import Elementwise
from pallas_kernels.tiles import TritonTiles
from tests.heads import exact_head

plt = _compat.pallas_triton()
needs_triton = pytest.mark.skipif(plt is None, reason="this jax has no Pallas Triton backend")
VOCAB, ROWS = 329, 5
GPU = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu"))


def side(seed, d_model, vocab_axis, t, **options):
    """A law from hidden states, with its normaliser."""
    keys = jax.random.split(jax.random.key(seed))
    h, w = jax.random.normal(keys[0], (ROWS, d_model)), 0.6 * jax.random.normal(keys[1], (VOCAB, d_model))
    options = Elementwise(**options)
    t = jnp.asarray(t, jnp.float32)
    x = dual.processed_logits(jnp.matmul(h, w.T, precision="highest"), options)
    top, token = jnp.max(x, axis=1), jnp.argmax(x, axis=1).astype(jnp.int32)
    total = jnp.sum(jnp.exp((x - top[:, None]) / jnp.where(t == 0, 1, t)[:, None]), axis=1)
    known = dual.Normalizer(top, total, token, None)
    return dual.Side(h, w.T if vocab_axis else w, t, options, known, vocab_axis, jax.lax.Precision.HIGHEST)


def one_token(tokens):
    return dual.Side(None, None, None, Elementwise(), dual.Normalizer(None, None, tokens, None))


@needs_triton
@pytest.mark.parametrize("draft", ["table", "one token"])
def test_the_kernel_agrees_with_the_plain_pass(draft):
    """Tables of unlike widths and layouts, a vocabulary that no tile divides, bias, mask, temperatures, factors of chains."""
    options = {"bias": jax.random.normal(jax.random.key(9), (VOCAB,)),
               "mask": jax.random.bernoulli(jax.random.key(8), 0.7, (ROWS, VOCAB))}
    target = side(0, 40, 0, [1.0, 0.7, 0.0, 2.0, 1.0], **options)
    q = one_token(target.normalizer.token) if draft == "one token" else side(1, 24, 1, [0.8, 1.0, 1.0, 1.0, 3.0])
    factor, keys = jnp.array([1.0, 0.0, 0.5, 2.0, 1.3]), (jnp.arange(ROWS, dtype=jnp.uint32),) * 2
    kernel = {"plt": plt, "interpret": True, "tiles": TritonTiles(64, 16, 16)}
    masses = dual.residual_mass(target, q, factor, vocab=VOCAB, block=112)
    assert float(masses.max() - masses.min()) > 0.05
    if draft == "one token":
        got = triton_dual.residual_mass(target, q, factor, vocab=VOCAB, **kernel)
        return np.testing.assert_allclose(got, masses, rtol=1e-5, atol=1e-6)
    want = dual.residual_draw(target, q, factor, keys, sample=3, vocab=VOCAB, block=112)
    got = triton_dual.residual_draw(target, q, factor, keys, sample=3, vocab=VOCAB, **kernel)
    np.testing.assert_array_equal(got[1], want[1])
    np.testing.assert_allclose(got[2], want[2], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got[0].total * jnp.exp(got[0].top), masses, rtol=1e-5)


@needs_triton
@pytest.mark.parametrize("valid", [(200, None), (200, 200), (0, 0), (None, 329)])
def test_padding_of_a_shard_has_no_mass(valid):
    """Of a cut vocabulary that is padded, the kernel reads the ids below `valid`, of either law; and it lowers."""
    sides = []
    for seed, end in enumerate(valid):
        x = side(seed, 24, 0, [1.0, 0.7, 0.0, 2.0, 1.0])
        known = x.normalizer._replace(token=jnp.where(x.normalizer.token < (end or 0), x.normalizer.token, -7))  # elsewhere
        sides.append(x._replace(normalizer=known, options=Elementwise(valid=None if end is None else jnp.int32(end))))
    factor, keys = jnp.array([1.0, 0.0, 0.5, 2.0, 1.3]), (jnp.arange(ROWS, dtype=jnp.uint32),) * 2
    kernel = functools.partial(triton_dual.residual_draw, sample=3, plt=plt, vocab=VOCAB, tiles=TritonTiles(64, 16, 16))
    want = dual.residual_draw(*sides, factor, keys, sample=3, vocab=VOCAB, block=112)
    got = kernel(*sides, factor, keys, interpret=True)
    np.testing.assert_allclose(got[0].total * jnp.exp(got[0].top), want[0].total * jnp.exp(want[0].top), rtol=1e-5, atol=1e-6)
    has_mass = np.asarray(want[0].top) > -np.inf
    assert has_mass.any() == (valid[0] != 0) and (np.asarray(want[1])[has_mass] < (valid[0] or VOCAB)).all()
    np.testing.assert_array_equal(got[1][has_mass], want[1][has_mass])
    with jax.sharding.use_abstract_mesh(GPU), warnings.catch_warnings():
        _compat.quiet_triton_deprecation()
        lowered = jax.jit(lambda *x: kernel(*sides, *x)).trace(factor, keys).lower(lowering_platforms=("cuda",))
    assert "residual_race" in lowered.as_text()


@needs_triton
@pytest.mark.parametrize("chains, w, kernels", [
    (1, "both", {"verify_chain"}), (2, "both", {"residual_search", "residual_mass"}), (1, "target", set()),
    (1, "one token", {"verify_chain"}),
])  # fmt: skip
@pytest.mark.parametrize("x64", [False, True])
def test_lowers_for_a_gpu(chains, w, kernels, x64):
    """Where both laws are given as hidden states the kernels run, also for several chains, and the search leaves nothing to a
    pass over both tables; else the plain code does. In 64-bit mode too: no 64-bit index reaches a kernel."""
    shape = lambda *s, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(s, dtype)  # noqa: E731
    lead = (2,) if chains == 1 else (2, chains)

    def run(h, w_p, draft_h, w_q, drafted, key):
        draft = {"both": Law(draft_h, w_q), "target": Law(draft_h @ w_q.T), "one token": None}[w]
        return (verify if chains == 1 else verify_chains)(Law(h, w_p, temperature=0.7), draft, drafted, key)

    with jax.enable_x64(x64), jax.sharding.use_abstract_mesh(GPU), warnings.catch_warnings():
        _compat.quiet_triton_deprecation()
        text = jax.jit(run).trace(
            shape(*lead, 5, 256), shape(4100, 256), shape(*lead, 4, 128), shape(4100, 128), shape(*lead, 4, dtype=jnp.int32),
            jax.eval_shape(lambda: jax.random.key(0))).lower(lowering_platforms=("cuda",)).as_text()
    names = "residual_search", "residual_mass", "residual_race", "verify_chain"
    assert {name for name in names if f"gumbeljax_{name}" in text} == kernels


@pytest.mark.gpu
@pytest.mark.parametrize("requests, chains", [(1, 1), (9, 1), (40, 1), (5, 2)])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_tokens_are_those_of_xla_on_a_gpu(dtype, requests, chains):
    """Logits that are exact in any order of summation: every token, whatever the kernels, and log-probs to rounding."""
    lead, vocab = (requests,) if chains == 1 else (requests, chains), 5003
    keys = jax.random.split(jax.random.key(0), 5)
    whole = lambda key, *shape: jax.random.randint(key, shape, -1, 2).astype(dtype)  # noqa: E731
    h, w, draft_w = whole(keys[0], *lead, 5, 192), whole(keys[1], vocab, 192) / 8, whole(keys[2], vocab, 96) / 8
    draft_h, verifies = h[..., :-1, :96], verify if chains == 1 else verify_chains
    drafted = gumbeljax.sample(draft_h, draft_w, keys[3])
    outs = []
    for name in (None, "triton", "xla"):
        p, q = Law(h, w, temperature=0.8, implementation=name), Law(draft_h, draft_w, implementation=name)
        outs.append(verifies(p, q, drafted, keys[4]))
    for out in outs[:2]:
        np.testing.assert_array_equal(out.tokens, outs[2].tokens)
        np.testing.assert_array_equal(out.num_accepted, outs[2].num_accepted)
        np.testing.assert_allclose(out.log_probs, outs[2].log_probs, rtol=1e-4, atol=1e-4)
    assert 0 < int(outs[2].num_accepted.sum()) < 4 * requests or requests == 1


@pytest.mark.gpu
@pytest.mark.parametrize("requests", [1, 8, 32])
def test_mosaic_tokens_are_those_of_xla_on_a_gpu(requests):
    """Twenty rounds on exact logits: every token, and no row that needs a pass over both tables."""
    vocab, width, draft_len = 32_768, 256, 4
    h, w = exact_head(vocab, width, requests * (draft_len + 1), jnp.bfloat16)
    h = h.reshape(requests, draft_len + 1, width)
    draft_h, draft_w = h[:, :-1, :192], jnp.array(w[:, :192])

    @functools.partial(jax.jit, static_argnames="name")
    def rounds(keys, name):
        def one(key):
            drafted = gumbeljax.sample(draft_h, draft_w, jax.random.fold_in(key, 1), implementation="xla")
            p, q = Law(h, w, temperature=0.8, implementation=name), Law(draft_h, draft_w, implementation=name)
            return verify_one(p, q, drafted, key, None)

        return jax.lax.map(one, keys)

    keys = jax.random.split(jax.random.key(0), 20)
    got, want = rounds(keys, "mosaic"), rounds(keys, "xla")
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_array_equal(got.num_accepted, want.num_accepted)
    np.testing.assert_allclose(got.log_probs, want.log_probs, rtol=1e-4, atol=1e-4)
    rejected = np.asarray(got.num_accepted) < draft_len
    assert rejected.mean() > 0.3 and not got.undecided.any()


def two_log_softmaxes(h, w, draft_h, draft_w, drafted, key):
    """The way without this library: logits of both laws, gather, residual, categorical."""
    logits = functools.partial(jnp.einsum, "rkd,vd->rkv", preferred_element_type=jnp.float32)
    log_p, log_q = jax.nn.log_softmax(logits(h, w)), jax.nn.log_softmax(logits(draft_h, draft_w))
    draft_len = drafted.shape[1]
    of_drafts = lambda x: jnp.take_along_axis(x, drafted[..., None], -1)[..., 0]  # noqa: E731
    coin, noise = jax.random.split(key)
    accepted = jnp.log(jax.random.uniform(coin, drafted.shape)) < of_drafts(log_p[:, :-1]) - of_drafts(log_q)
    n = jnp.sum(jnp.cumprod(accepted, axis=1), axis=1)
    p = jnp.take_along_axis(log_p, n[:, None, None], 1)[:, 0]
    q = jnp.take_along_axis(log_q, jnp.minimum(n, draft_len - 1)[:, None, None], 1)[:, 0]
    residual = jnp.log(jnp.maximum(jnp.exp(p) - jnp.exp(q), 0))
    return n, jax.random.categorical(noise, jnp.where((n < draft_len)[:, None], residual, p))


def test_memory_of_large_heads():
    """(151,936 x 4,096) and (151,936 x 2,048), 32 requests of 8 drafted tokens, compiled and never run: under 2%."""
    def fused(h, w, draft_h, draft_w, drafted, key):
        return verify(Law(h, w), Law(draft_h, draft_w), drafted, key)

    rows, draft_len, vocab = 32, 8, 151_936
    shape = lambda *s, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(s, dtype)  # noqa: E731
    arguments = (shape(rows, draft_len + 1, 4096), shape(vocab, 4096), shape(rows, draft_len, 2048), shape(vocab, 2048),
                 shape(rows, draft_len, dtype=jnp.int32), jax.eval_shape(lambda: jax.random.key(0)))
    ours, plain = (jax.jit(f).lower(*arguments).compile().memory_analysis().temp_size_in_bytes
                   for f in (fused, two_log_softmaxes))
    assert plain > 4 * rows * draft_len * vocab  # the measure sees a law's logits
    assert ours < 0.02 * plain
