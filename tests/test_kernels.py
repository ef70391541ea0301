"""The GPU kernels without a GPU: run by the interpreter against the oracle, and lowered for three devices."""

import functools
import os
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

import gumbeljax
from gumbeljax import _call, _compat, _implementation
from pallas_kernels import many, mosaic, mosaic_kernel, triton, xla
from pallas_kernels.logits import Elementwise, canonical_temperature
from pallas_kernels.tiles import MosaicTiles, TritonTiles
from tests import heads, oracles

plt, mgpu = _compat.pallas_triton(), _compat.pallas_mosaic()
pytestmark = pytest.mark.skipif(plt is None, reason="this jax has no Pallas Triton backend")
needs_mosaic = pytest.mark.skipif(mgpu is None, reason="this jax has no Mosaic GPU backend")
ROOT = Path(__file__).resolve().parents[1]
DEVICES = [("NVIDIA H200", 132), ("NVIDIA A100-SXM4-80GB", 108), ("NVIDIA L4", 58)]


draw = functools.partial(triton.draw, plt=plt, with_model=True)


@pytest.mark.parametrize("vocab", [1, 15, 16, 17, 31, 33, 63, 64, 65, 1009])
@pytest.mark.parametrize("rows, dtype, vocab_axis", [(1, jnp.float32, 0), (17, jnp.bfloat16, 1), (64, jnp.float16, 0)])
def test_interpreted_kernel_equals_the_oracle(vocab, rows, dtype, vocab_axis):
    h, w = heads.exact_head(vocab, 40, rows, dtype, vocab_axis)
    _, words = heads.keys_of(vocab, rows)
    t = np.random.default_rng(0).choice([0.0, 0.5, 1.0, 2.0], rows)
    out = draw(h, w, tuple(jnp.asarray(words.T)), canonical_temperature(t), Elementwise(), vocab=vocab, vocab_axis=vocab_axis,
               interpret=True)
    heads.assert_pathwise(out.token, heads.exact_logits(h, w, vocab_axis), words, t)


@pytest.mark.parametrize("tiles", [
    TritonTiles(16, 16, 16), TritonTiles(32, 16, 64), TritonTiles(128, 32, 32), TritonTiles(64, 4, stored=True)])
def test_tiles_and_options(tiles):
    vocab, rows = 203, 18
    h, w = heads.exact_head(vocab, 40, rows)
    _, words = heads.keys_of(3, rows)
    rng = np.random.default_rng(1)
    t = rng.choice([0.0, 1e-6, 1.0, 3.0], rows)
    given = {"scale": 0.5, "soft_cap": 4.0, "logit_bias": rng.integers(-2, 3, (rows, vocab)).astype(np.float32),
             "mask": rng.random(vocab) < 0.6}
    options = Elementwise(0.5, 4.0, jnp.asarray(given["logit_bias"])[:, :200], jnp.asarray(given["mask"])[:200])
    out = draw(h, w, tuple(jnp.asarray(words.T)), canonical_temperature(t), options, vocab=200, tiles=tiles, interpret=True)
    laws = oracles.processed_logits(heads.exact_logits(h, w), valid_vocab=200, **given)
    heads.assert_pathwise(out.token, laws.processed, words, t)
    i = np.arange(rows)
    np.testing.assert_allclose(out.tempered_log_prob, oracles.log_softmax(laws.processed, t)[i, out.token], atol=2e-5)
    np.testing.assert_allclose(out.model_log_prob, oracles.log_softmax(laws.model)[i, out.token], atol=2e-5)


def test_masses_and_groups_equal_the_plain_twin():
    h, w = heads.exact_head(1009, 40, 17)
    t = jnp.linspace(0, 2, 17)
    for twin, kernel in [(xla.stage1_mass, triton.stage1_mass), (xla.stage1_groups, triton.stage1_groups)]:
        want = twin(h, w, t, vocab=1009, precision=jax.lax.Precision.HIGHEST)
        got = kernel(h, w, t, plt=plt, vocab=1009, precision=jax.lax.Precision.HIGHEST, interpret=True)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)


@functools.partial(jax.jit, static_argnames="vocab")
def draw_and_twin(h, w, words, t, *, vocab):
    return (draw(h, w, words, t, Elementwise(), vocab=vocab, interpret=True),
            xla.draw(h, w, words, t, vocab=vocab, with_model=True))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [0, 63, 64, 202])
def test_bad_logits_are_marked_as_by_the_plain_twin(bad, where):
    h, w = heads.pinned_head(np.zeros(203), rows=3)
    w = w.at[where, 0].set(bad) if bad != -np.inf else w.at[:, 0].set(bad)
    words = tuple(jnp.asarray(heads.keys_of(0, 3)[1].T))
    t = jnp.array([0.0, 1.0, 0.3])
    out, twin = draw_and_twin(h, w, words, t, vocab=203)
    assert out.token.tolist() == twin.token.tolist() == [-1, -1, -1]
    assert np.isnan(out.tempered_log_prob).all() and np.isnan(twin.tempered_log_prob).all()


def test_vmap_over_everything():
    h, w = heads.exact_head(130, 32, 6)
    h, w = h.reshape(2, 3, 32), jnp.stack([w, w[::-1]])
    words = jax.random.key_data(jax.random.split(jax.random.key(0), (2, 3)))
    f = lambda h, w, k, t: draw(h, w, (k[:, 0], k[:, 1]), t, Elementwise(), vocab=130, interpret=True).token  # noqa: E731
    t = jnp.ones((2, 3))
    want = jnp.stack([f(h[i], w[i], words[i], t[i]) for i in range(2)])
    np.testing.assert_array_equal(jax.vmap(f)(h, w, words, t), want)
    want = jnp.stack([f(h[i], w[0], words[i], t[0]) for i in range(2)])
    np.testing.assert_array_equal(jax.vmap(f, (0, None, 0, None))(h, w[0], words, t[0]), want)


@needs_mosaic
@pytest.mark.timeout(1600)
def test_interpreted_mosaic_kernels():
    """tests/interpreted_mosaic.py in a process of its own: JAX's interpreter of Mosaic GPU kernels runs its threads through
    host callbacks and, rarely, stalls on two busy cores. A stall is tried again; a failure is not."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/interpreted_mosaic.py"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    for attempt in range(3):
        try:
            run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False)
        except subprocess.TimeoutExpired:
            assert attempt < 2, "three stalls in a row"
            continue
        assert run.returncode == 0 and "37 passed" in run.stdout, run.stdout + run.stderr
        return


def test_one_temperature_is_one_number_for_all_rows(monkeypatch):
    """Kernels then read one number: nothing that gives a row its own, or takes it away, may say so. Elsewhere it is of no use,
    and a second program."""
    h, w = jnp.zeros((4, 16)), jnp.zeros((32, 16))
    banned = gumbeljax.Processors(banned_tokens=jnp.array([1]))

    def known(**options):
        return _call.prepare(h, w, **options)[1].one_temperature

    assert not known()
    hopper = _implementation.DeviceFacts("gpu", (9, 0), 132, "NVIDIA H200")
    monkeypatch.setattr(_implementation, "device_facts", lambda *_: hopper)
    assert known() and known(temperature=0.5) and known(temperature=jnp.float32(2.0)) and known(logit_bias=jnp.zeros(32))
    assert jax.jit(lambda t: known(temperature=t) + t)(1.0) == 2.0
    for options in ({"temperature": jnp.full(4, 0.5)}, {"temperature": [0.1, 0.2, 0.3, 0.4]}, {"top_k": 3},
                    {"processors": banned}):
        assert not known(**options), options


@needs_mosaic
@pytest.mark.parametrize("rows", [16_897, 17_152, 33_800])
def test_more_rows_than_mosaic_takes_at_once(rows):
    """Parts of the rows, of which one would have programs for two pieces of the vocabulary, say the same number of things."""
    shape = jax.ShapeDtypeStruct
    h, w, t, word = (shape(*x) for x in (((rows, 64), jnp.bfloat16), ((32_000, 64), jnp.bfloat16), ((rows,), jnp.float32),
                                         ((rows,), jnp.uint32)))
    draw = functools.partial(mosaic.draw, mgpu=mgpu, plt=plt, vocab=32_000)
    out = jax.eval_shape(lambda h, w, word, t: draw(h, w, (word, word), t), h, w, word, t)
    assert out.token.shape == (rows,)


@needs_mosaic
@pytest.mark.parametrize("vocab_axis", [0, 1])
@pytest.mark.parametrize("vocab, d_model, rows", [
    (151_936, 4_096, 1), (151_936, 4_096, 128), (128_256, 8_192, 256), (512, 64, 65)])
def test_mosaic_lowers(vocab, d_model, rows, vocab_axis):
    shape = jax.ShapeDtypeStruct
    h, w = shape((rows, d_model), jnp.bfloat16), shape((vocab, d_model)[:: 1 - 2 * vocab_axis], jnp.bfloat16)
    words, t = (shape((rows,), jnp.uint32),) * 2, shape((rows,), jnp.float32)
    table = {"mgpu": mgpu, "vocab": vocab - 3, "vocab_axis": vocab_axis}

    def everything(h, w, words, t):
        return (mosaic.draw(h, w, words, t, plt=plt, with_model=True, **table), mosaic.draw(h, w, words, t, plt=plt, **table),
                mosaic.scored_piece(h, w, words, t, plt=plt, **table)[1].told,
                mosaic.stage1_mass(h, w, t, Elementwise(0.5, 30.0), plt=plt, **table))

    assert "mosaic_gpu" in lower(everything, DEVICES[0], h, w, words, t).as_text()


@pytest.mark.parametrize("h, w, options, axis, why", [
    ((4, 64), (512, 64), Elementwise(mask=True), 0, "neither logit_bias nor mask"),
    ((4, 64), (509, 64), Elementwise(), 0, "multiple of 8 and d_model of 64"),
    ((4, 64), (64, 520), Elementwise(), 1, "multiple of 64 and d_model of 64"),
    ((4, 40), (512, 40), Elementwise(), 0, "multiple of 8 and d_model of 64")])
def test_mosaic_says_what_it_cannot_run(h, w, options, axis, why):
    h, w = jnp.zeros(h, jnp.bfloat16), jnp.zeros(w, jnp.bfloat16)
    assert why in mosaic_kernel.why_not(h, w, options, axis)
    assert "bfloat16 or float16" in mosaic_kernel.why_not(h.astype(jnp.float32), w, Elementwise(), 0)


@needs_mosaic
@pytest.mark.parametrize("tiles, rule", [
    ({"vocab": 256}, "multiple of 16 and at most 144"), ({"vocab": 72}, "multiple of 16"),
    ({"d_model": 96}, "d_model must be 64, 128 or 256"),
    ({"steps": 1}, "steps at least 2"), ({"pair_rows": True}, "pair_rows must be False without split_rows"),
    ({"d_model": 128}, r"^tiles\.d_model must divide d_model, 64; got 128")])
def test_mosaic_tiles_that_would_lose_logits_are_refused(tiles, rule):
    h, w = jnp.zeros((4, 64), jnp.bfloat16), jnp.zeros((512, 64), jnp.bfloat16)
    words, t = (jnp.zeros(4, jnp.uint32),) * 2, jnp.ones(4)
    with pytest.raises(ValueError, match=rule):
        mosaic.draw(h, w, words, t, plt=plt, mgpu=mgpu, vocab=512, tiles=MosaicTiles(**tiles))


@needs_mosaic
def test_mosaic_copies_a_transposed_table_in_boxes_of_64_ids():
    h, w = jnp.zeros((4, 64), jnp.bfloat16), jnp.zeros((64, 512), jnp.bfloat16)
    words, t = (jnp.zeros(4, jnp.uint32),) * 2, jnp.ones(4)
    with pytest.raises(ValueError, match=r"^tiles\.vocab must be a multiple of 64 for w \[d_model, vocab\]; got 48"):
        mosaic.draw(h, w, words, t, plt=plt, mgpu=mgpu, vocab=512, vocab_axis=1, tiles=MosaicTiles(vocab=48))


def lower(f, device, *arguments):
    """Lowers for CUDA on a machine without one."""
    name, cores = device
    mesh = AbstractMesh((), (), abstract_device=AbstractDevice(name, cores, "gpu"))
    with jax.sharding.use_abstract_mesh(mesh), warnings.catch_warnings():
        _compat.quiet_triton_deprecation()
        return jax.jit(f).trace(*arguments).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d[0])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32], ids=lambda d: jnp.dtype(d).name)
@pytest.mark.parametrize("vocab_axis", [0, 1])
@pytest.mark.parametrize("vocab, d_model, rows", [(151_936, 4_096, 1), (50_257, 768, 17), (1_009, 3, 256), (5, 1, 3)])
def test_every_configuration_lowers(device, dtype, vocab_axis, vocab, d_model, rows):
    shape = jax.ShapeDtypeStruct
    h, w = shape((rows, d_model), dtype), shape((vocab, d_model)[:: 1 - 2 * vocab_axis], dtype)
    words, t = (shape((rows,), jnp.uint32),) * 2, shape((rows,), jnp.float32)
    bias, mask = shape((vocab,), jnp.float32), shape((rows, vocab), jnp.bool_)
    precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
    table = {"plt": plt, "vocab": vocab, "vocab_axis": vocab_axis, "precision": precision}

    def everything(h, w, words, t, bias, mask):
        options = Elementwise(0.5, 30.0, bias, mask)
        top, total = triton.stage1_groups(h, w, t, options, **table)
        distinct = many.without_replacement(h, w, words, t, options, top, total, None, num_samples=min(4, vocab), vocab=vocab,
                                            vocab_axis=vocab_axis)
        return (draw(h, w, words, t, options, vocab=vocab, vocab_axis=vocab_axis, precision=precision),
                draw(h, w, words, t, Elementwise(), vocab=vocab, vocab_axis=vocab_axis, precision=precision),
                triton.stage1_mass(h, w, t, **table), distinct)

    text = lower(everything, device, h, w, words, t, bias, mask).as_text()
    assert text.count("__gpu$xla.gpu.triton") >= 4 or text.count("triton") >= 4


@pytest.mark.parametrize("precision", list(jax.lax.Precision))
def test_float32_precisions_lower(precision):
    shape = jax.ShapeDtypeStruct
    f = functools.partial(triton.stage1_mass, plt=plt, vocab=1009, precision=precision)
    out = lower(f, DEVICES[0], shape((16, 64), jnp.float32), shape((1009, 64), jnp.float32), shape((16,), jnp.float32))
    assert "triton" in out.as_text()


def test_lowering_in_64_bit_mode():
    """CASES F-1: no 64-bit index reaches the kernel."""
    with jax.enable_x64(True):
        shape = jax.ShapeDtypeStruct
        f = functools.partial(triton.draw, plt=plt, vocab=1009)
        words = (shape((16,), jnp.uint32),) * 2
        h, w, t = (shape(s, jnp.float32) for s in [(16, 64), (1009, 64), (16,)])
        out = lower(f, DEVICES[0], h, w, words, t)
        assert "triton" in out.as_text()


@needs_mosaic
def test_mosaic_lowers_in_64_bit_mode():
    with jax.enable_x64(True):
        shape = jax.ShapeDtypeStruct
        f = functools.partial(mosaic.stage1_mass, plt=plt, mgpu=mgpu, vocab=512)
        out = lower(f, DEVICES[0], shape((65, 64), jnp.bfloat16), shape((512, 64), jnp.bfloat16), shape((65,), jnp.float32))
        assert "mosaic_gpu" in out.as_text()


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d[0])
@pytest.mark.parametrize("rows", [1, 64])
def test_the_public_functions_lower_for_a_named_device(device, rows):
    """Under a mesh of an abstract device, the choice is made for that device, without a warning."""
    shape = jax.ShapeDtypeStruct
    h, w, tokens = shape((rows, 128), jnp.bfloat16), shape((5120, 128), jnp.bfloat16), shape((rows,), jnp.int32)
    keys, mask = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), rows)), shape((rows, 5120), jnp.bool_)
    chosen = []

    def everything(h, w, keys, tokens, mask):
        chosen.append(gumbeljax.choose_implementation(h, w))
        chosen.append(gumbeljax.choose_implementation(h, w, mask=mask))
        return (gumbeljax.sample(h, w, keys), gumbeljax.sample_with_log_probs(h, w, keys, mask=mask), gumbeljax.greedy(h, w),
                gumbeljax.sample(h, w, keys, num_samples=3), gumbeljax.sample(h, w, keys, num_samples=3, replace=False),
                jax.grad(lambda h: gumbeljax.log_prob(h, w, tokens).sum())(h))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = lower(everything, device, h, w, keys, tokens, mask).as_text()
    hopper = "H200" in device[0] and mgpu is not None
    assert chosen == ["mosaic" if hopper else "triton", "triton"]
    assert ("mosaic_gpu" in text) == hopper and "triton" in text


def test_a_named_backend_is_refused_for_a_device_that_lacks_it():
    h, w = jnp.zeros((64, 128), jnp.bfloat16), jnp.zeros((512, 128), jnp.bfloat16)
    f = lambda h, w: gumbeljax.sample(h, w, jax.random.key(0), implementation="mosaic")  # noqa: E731
    with pytest.raises(NotImplementedError, match="needs a Hopper GPU"):
        lower(f, DEVICES[1], h, w)
