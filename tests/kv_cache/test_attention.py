"""The kernel for attention over pages, interpreted, against the XLA route and float64; lowered for CUDA without a GPU."""

import warnings
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from gumbeljax import _compat, kv_cache
from gumbeljax.kv_cache.attention import _by_xla
from gumbeljax.kv_cache.slots import Slots
from pallas_kernels import triton_attention
from pallas_kernels.triton_attention import AttentionTiles

plt = _compat.pallas_triton()
pytestmark = pytest.mark.skipif(plt is None, reason="this jax has no Pallas Triton backend")


class Call(NamedTuple):
    q: jax.Array
    keys: jax.Array
    values: jax.Array
    slots: Slots


def call(lengths, *, seq=1, page_size=16, num_heads=4, num_kv_heads=2, head_dim=32, max_length=128, dtype=jnp.float32, seed=0):
    """Rows of these lengths over pages in random order; pages that nobody owns, and slots past the end, hold NaN."""
    rng = np.random.default_rng(seed)
    batch, max_blocks = len(lengths), -(-max_length // page_size)
    num_pages = batch * max_blocks + 3
    order, tables = rng.permutation(num_pages), np.full((batch, max_blocks), -1, np.int32)
    keys, values = np.full((2, num_pages, page_size, num_kv_heads, head_dim), np.nan, np.float32)
    for row, length in enumerate(lengths):
        held = -(-length // page_size)
        tables[row, :held], order = order[:held], order[held:]
        for side in (keys, values):
            new = np.full((held * page_size, num_kv_heads, head_dim), np.nan, np.float32)
            new[:length] = rng.normal(size=(length, num_kv_heads, head_dim))
            side[tables[row, :held]] = new.reshape(held, page_size, num_kv_heads, head_dim)
    lengths = np.asarray(lengths, np.int32)
    positions = lengths[:, None] - seq + np.arange(seq, dtype=np.int32)
    q = jnp.asarray(rng.normal(size=(batch, seq, num_heads, head_dim)), dtype)
    slots = Slots(*(jnp.asarray(x) for x in (positions, positions, positions, tables, lengths)))  # nothing is written here
    return Call(q, jnp.asarray(keys, dtype), jnp.asarray(values, dtype), slots)


def by_kernel(x: Call, window=None, **tiles):
    slots = x.slots
    cache = x.keys, x.values, slots.positions, slots.block_tables, slots.lengths
    return triton_attention.attend(x.q, *cache, plt=plt, window=window, tiles=AttentionTiles(**tiles), interpret=True)


def in_float64(x: Call, window=None) -> np.ndarray:
    """Row by row, query by query."""
    q, keys, values = (np.asarray(a.astype(jnp.float32), np.float64) for a in x[:3])
    out, group = np.zeros(q.shape), q.shape[2] // keys.shape[2]
    for row, (table, length) in enumerate(zip(np.asarray(x.slots.block_tables), np.asarray(x.slots.lengths), strict=True)):
        k, v = (np.repeat(side[table].reshape(-1, *side.shape[2:]), group, axis=1) for side in (keys, values))
        for i, position in enumerate(np.asarray(x.slots.positions)[row]):
            last, first = min(position + 1, length), 0 if window is None else max(position - window + 1, 0)
            if first < last:
                logits = np.einsum("hd,khd->hk", q[row, i], k[first:last]) / np.sqrt(q.shape[-1])
                weights = np.exp(logits - logits.max(-1, keepdims=True))
                out[row, i] = np.einsum("hk,khd->hd", weights / weights.sum(-1, keepdims=True), v[first:last])
    return out


TOLERANCE = {jnp.float32: 2e-6, jnp.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("seq, num_heads, num_kv_heads", [(1, 4, 2), (1, 9, 3), (5, 4, 2), (3, 2, 2)])
def test_kernel_and_gather_are_attention(seq, num_heads, num_kv_heads, page_size, window, dtype):
    """Grouped heads, several queries, lengths that end anywhere in a page, an empty row."""
    x = call([5, 128, 0, 17, 64, 33], seq=seq, page_size=page_size, num_heads=num_heads, num_kv_heads=num_kv_heads, dtype=dtype)
    want = in_float64(x, window)
    for got in (by_kernel(x, window), by_kernel(x, window, slots=16, parts=3), _by_xla(*x, window)):
        assert got.dtype == dtype
        np.testing.assert_allclose(np.asarray(got, np.float64), want, atol=TOLERANCE[dtype])
    assert np.all(np.asarray(by_kernel(x, window), np.float64)[2] == 0)


@pytest.mark.parametrize("tiles", [{"slots": 16}, {"slots": 128}, {"slots": 256}, {"parts": 2}, {"slots": 32, "parts": 7}])
def test_tiles_change_nothing_but_the_last_bits(tiles):
    x = call([100, 31, 1], seq=2)
    np.testing.assert_allclose(by_kernel(x, **tiles), by_kernel(x), atol=1e-6)


@pytest.mark.parametrize("max_length, slots, parts", [(60, 64, 1), (256, 256, 1), (1024, 256, 2)])
def test_programs_that_are_alone_take_many_slots_at_once(max_length, slots, parts):
    x = call([max_length - 3], max_length=max_length, dtype=jnp.bfloat16)
    tiles = triton_attention.default_tiles(x.q, x.keys, max_length)
    assert (tiles.slots, tiles.parts) == (slots, parts)
    np.testing.assert_allclose(np.asarray(by_kernel(x, **tiles._asdict()), np.float64), in_float64(x), atol=2e-2)
    many = call([5] * 128, max_length=32, dtype=jnp.bfloat16)
    assert triton_attention.default_tiles(many.q, many.keys, 256).slots == 64


def test_positions_past_the_end_see_the_whole_row():
    """Rows at rest run there: nothing is read that does not exist, and the result is finite."""
    x = call([40, 7])
    x = x._replace(slots=x.slots._replace(positions=jnp.array([[128], [128]])))
    np.testing.assert_allclose(by_kernel(x), in_float64(x), atol=2e-6)
    assert np.all(np.asarray(by_kernel(x, window=3)) == 0)


def test_pages_beyond_a_length_are_not_read():
    """Table entries beyond the length, and before the window, may say anything, even what is no page."""
    x = call([20, 70], page_size=16)
    tables = np.asarray(x.slots.block_tables).copy()
    tables[0, 2:], tables[1, 5:] = 10**6, 10**6
    hostile = x._replace(slots=x.slots._replace(block_tables=jnp.asarray(tables)))
    np.testing.assert_array_equal(by_kernel(hostile), by_kernel(x))
    tables[1, :3], tables[0, 0] = 10**6, 10**6
    hostile = hostile._replace(slots=hostile.slots._replace(block_tables=jnp.asarray(tables)))
    np.testing.assert_array_equal(by_kernel(hostile, window=4), by_kernel(x, window=4))


@pytest.mark.parametrize("window, page_size, most", [(20, 16, 3), (1, 4, 1), (17, 16, 2), (18, 16, 3)])
def test_a_windowed_step_gathers_the_pages_of_its_window_alone(window, page_size, most):
    x = call([5, 128, 77], page_size=page_size)
    text = str(jax.make_jaxpr(partial(_by_xla, window=window))(*x))
    assert f"[3,{most},{page_size},2,32]" in text and f"[3,{128 // page_size},{page_size},2,32]" not in text
    np.testing.assert_allclose(_by_xla(*x, window), in_float64(x, window), atol=2e-6)


def lowered(f, *arguments):
    mesh = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu"))
    with jax.sharding.use_abstract_mesh(mesh), warnings.catch_warnings():
        warnings.simplefilter("error")
        return jax.jit(f).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=lambda d: jnp.dtype(d).name)
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("rows, seq, num_heads, num_kv_heads, head_dim, page_size", [
    (1, 1, 16, 8, 128, 16), (64, 8, 16, 8, 128, 1), (256, 1, 9, 3, 64, 64), (2, 1, 32, 2, 256, 3)])
def test_the_kernel_is_chosen_and_lowers(rows, seq, num_heads, num_kv_heads, head_dim, page_size, window, dtype):
    shape = jax.ShapeDtypeStruct
    cache = jax.eval_shape(lambda: kv_cache.init_paged(1, rows, 2048, num_kv_heads, head_dim, dtype, page_size=page_size))
    flat = jax.eval_shape(lambda: kv_cache.init_contiguous(1, rows, 2048, num_kv_heads, head_dim, dtype))

    def step(q, cache, positions):
        return kv_cache.attend(q, cache.keys[0], cache.values[0], kv_cache.locate(cache, positions), window=window)

    q, positions = shape((rows, seq, num_heads, head_dim), dtype), shape((rows, seq), jnp.int32)
    for kind in (cache, flat):
        text = lowered(step, q, kind, positions)
        assert text.count("gumbeljax_attention") >= 1 and "stablehlo.gather" not in text.split("gumbeljax_attention")[1]
        loss = jax.value_and_grad(lambda *x: jnp.sum(step(*x).astype(jnp.float32)))
        assert "gumbeljax_attention" in lowered(loss, q, kind, positions)


def test_what_the_kernel_cannot_run_is_said_or_run_by_xla():
    x = call([20, 70])
    with pytest.raises(NotImplementedError, match="runs on cpu"):
        kv_cache.attend(*x, implementation="triton")
    with pytest.raises(ValueError, match="'xla', 'triton'"):
        kv_cache.attend(*x, implementation="mosaic")
    long = call([100], seq=80)
    assert "64 queries" in triton_attention.why_not(long.q, long.keys)
    odd = call([20], head_dim=24)
    assert "power of two" in triton_attention.why_not(odd.q, odd.keys)
    for y in (long, odd):
        assert "gumbeljax_attention" not in lowered(kv_cache.attend, *y)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("rows, seq, window", [(1, 1, None), (64, 1, None), (64, 1, 100), (16, 5, None), (256, 1, None)])
def test_both_routes_on_the_device(rows, seq, window, page_size):
    """The shape of Qwen3-1.7B: 16 heads over 8 of 128."""
    lengths = np.random.default_rng(rows).integers(seq, 257, rows)
    shape = {"seq": seq, "page_size": page_size, "num_heads": 16, "num_kv_heads": 8, "head_dim": 128}
    x = call(lengths, max_length=256, dtype=jnp.bfloat16, **shape)
    got, want = (jax.jit(partial(kv_cache.attend, window=window, implementation=name))(*x) for name in ("triton", "xla"))
    np.testing.assert_allclose(np.asarray(got, np.float64), np.asarray(want, np.float64), atol=2e-2)
    longer = call([4000, 2500], max_length=4096, **shape)
    got = kv_cache.attend(*longer, window=window, implementation="triton")
    np.testing.assert_allclose(got, in_float64(longer, window), atol=1e-5)
