"""The kernels that draw under filters, without a GPU: interpreted, against the oracle and the plain twin, and lowered."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gumbeljax
from gumbeljax import _compat
from pallas_kernels import filtered, kept, triton_filtered, triton_prefix, triton_shapes
from pallas_kernels.kept import Filters
from pallas_kernels.logits import Elementwise, canonical_temperature
from tests import filter_oracle as oracle
from tests import heads, knobs
from tests.filter_oracle import Options
from tests.test_kept_set import tier_case
from tests.test_kernels import DEVICES, lower

plt = _compat.pallas_triton()
pytestmark = pytest.mark.skipif(plt is None, reason="this jax has no Pallas Triton backend")
OPTIONS = {"valid_vocab": 700, "scale": 0.5, "soft_cap": 4.0}


@functools.partial(jax.jit, static_argnames=("vocab", "scale", "soft_cap", "with_log_probs"))
def both(logits, words, t, filters, dense, *, vocab, scale=None, soft_cap=None, with_log_probs=True):
    """((draw, end) of the kernels, draw of the plain twin, kept set of the kernels) for stored logits."""
    options = Elementwise(scale, soft_cap, **dense)
    arguments = logits, None, words, t, options, filters
    draw, end = triton_filtered.draw(*arguments, plt=plt, vocab=vocab, with_log_probs=with_log_probs, interpret=True)
    x = filtered.all_logits(logits, None, options, vocab=vocab)[1]
    ids = jnp.arange(vocab)[:, None]
    is_kept = (x > -jnp.inf) & kept.is_kept(kept.ordered_keys(x), ids, end)
    if filters.min_p is not None:
        is_kept &= kept.is_above(x, t, jnp.max(x, axis=0), filters.min_p)
    return draw, filtered.draw(*arguments, vocab=vocab, with_log_probs=with_log_probs), is_kept.T


def ask(logits, options: Options, seed=0, dense=(), **static):
    """`both`, and the words of the keys."""
    rows = len(logits)
    words = heads.keys_of(seed, rows)[1]
    filters = knobs.filters_of(options, rows)
    t = canonical_temperature(filters.pop("temperature"))
    dense = {name: jnp.asarray(x)[..., :static.get("vocab", logits.shape[1])] for name, x in dict(dense).items()}
    return *both(jnp.asarray(logits, jnp.float32), tuple(jnp.asarray(words.T)), t, Filters(**filters), dense,
                 **{"vocab": logits.shape[1]} | static), words


def assert_right(logits, options: Options, got, twin, is_kept, words):
    """Kept set, token and log-probs are the oracle's, and the twin's where the kept sets are one."""
    want, rows = oracle.laws(logits, options), np.arange(len(logits))
    is_kept, t = np.asarray(is_kept), oracle.per_row(oracle.f32(options.temperature), len(logits))
    x = want.logits[:, :is_kept.shape[1]]
    filters = Options(options.temperature, options.top_k, options.top_p, options.min_p)
    knobs.assert_kept(is_kept, x, filters)
    in_set = np.where(is_kept, x, -np.inf)
    heads.assert_pathwise(got.token, in_set, words, t)
    np.testing.assert_array_equal(got.token, twin.token)
    tempered, processed = want.tempered[rows, got.token], oracle.oracles.log_softmax(in_set, t)[rows, got.token]
    for name, law in (("tempered_log_prob", tempered), ("processed_log_prob", processed),
                      ("model_log_prob", want.model[rows, got.token])):
        knobs.assert_log_probs(getattr(got, name), law, 5e-5)
    np.testing.assert_allclose(got.log_normalizer, twin.log_normalizer, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [2049, 33_000])
def test_every_path_finds_the_kept_set(vocab):
    """Sets that fit the largest groups, that end in the gap that the samples show, and that take the whole row."""
    _, logits, options = tier_case(vocab)
    got, twin, is_kept, words = ask(logits, options)
    assert_right(logits, options, got, twin, is_kept, words)


def rows_for_ranks(vocab, rng):
    """Rows on which the bounds that `settle` guesses do well, and badly."""
    x = rng.normal(size=vocab).astype(np.float32)
    ids, groups = np.arange(vocab), np.arange(vocab) // 16
    return [
        x,
        x.round(1) * 4,  # ties, some hundreds at each of the larger values
        np.where(ids < 1200, 6 + x.round(2), x),  # more tokens of the leading groups than are ranked
        np.where(ids < 1200, 6.0, x),  # and they tie
        np.zeros(vocab),
        np.where(ids % 16 == 3, 2.0, 0.0),  # every group has the same maximum
        np.where(groups % 3 == 0, x + 40, x),  # outliers in every lane
        np.where(groups % 11 == 0, x, -np.inf),  # all groups that are left are listed
        np.where(ids % 3001 == 5, x, -np.inf),
    ]


@pytest.mark.parametrize("names", ["kp", "k", "p", pytest.param("kpm", marks=pytest.mark.slow)])
def test_ranks_decide_what_bisection_would(names):
    """The end of a prefix among the largest tokens: ties, more tokens than fit, counts and masses at the edges."""
    vocab = 16 * 420
    base = rows_for_ranks(vocab, np.random.default_rng(3))
    cases = [(1, 0.9, 0.0), (50, 1e-9, 0.0), (50, 0.95, 0.1), (224, 0.5, 0.0), (230, 1 - 1e-6, 0.3), (300, 0.999, 0.0),
             (0, 0.3, 0.0), (0, 0.97, 0.6), (6000, 0.05, 0.0), (vocab - 1, 1.0, 0.0), (0, 1.0, 1.0)]
    logits = np.repeat(np.stack(base), len(cases), axis=0).astype(np.float32)
    k, p, m = (np.tile(a, len(base)) for a in zip(*cases, strict=True))
    options = Options(1.0, k if "k" in names else 0, p if "p" in names else 1.0, m if "m" in names else 0.0)
    filters = knobs.filters_of(options, len(logits))
    on = Filters(**{name: filters[name] for letter, name in zip("kpm", Filters._fields, strict=True) if letter in names})
    words = heads.keys_of(0, len(logits))[1]
    t = canonical_temperature(filters["temperature"])
    got, twin, is_kept = both(jnp.asarray(logits), tuple(jnp.asarray(words.T)), t, on, {}, vocab=vocab)
    assert_right(logits, options, got, twin, is_kept, words)


@pytest.mark.slow
@pytest.mark.parametrize("vocab, rows", [(1, 1), (16, 5), (37, 5)])
def test_small_vocabularies(vocab, rows):
    rng = np.random.default_rng(vocab)
    for seed in range(6):
        logits = np.stack([knobs.row_of(rng.choice(knobs.KINDS), vocab, rng) for _ in range(rows)])
        pick = lambda *values: rng.choice(values, rows)  # noqa: E731
        options = Options(pick(0.0, 0.5, 1.0, 2.0), pick(-1, 0, 1, 5, vocab - 1, vocab, 2**30), pick(0.0, 0.3, 0.9, 1.0),
                          pick(0.0, 0.05, 1.0))
        got, twin, is_kept, words = ask(logits, options, seed)
        assert_right(logits, options, got, twin, is_kept, words)


@pytest.mark.slow
def test_processors_come_first():
    """Scale, soft cap, bias by row, mask, and a vocabulary narrower than the table."""
    rows, vocab = 5, 707
    rng = np.random.default_rng(5)
    logits = np.stack([knobs.row_of("grid", vocab, rng) for _ in range(rows)])
    bias, mask = rng.integers(-8, 9, (rows, vocab)) / 4, rng.random(vocab) < 0.3
    filters = Options([0.0, 0.5, 1.0, 2.0, 1.0], [40, 0, 0, 300, 0], [0.9, 0.9, 1.0, 0.5, 0.3], [0.0, 0.0, 0.2, 0.0, 0.01])
    got, twin, is_kept, words = ask(logits, filters, dense={"bias": np.float32(bias), "mask": mask}, vocab=700, scale=0.5,
                                    soft_cap=4.0)
    options = filters._replace(logit_bias=bias, mask=mask, **OPTIONS)
    assert_right(logits, options, got, twin, is_kept, words)


@pytest.mark.parametrize("on", ["top_k", "top_p", "min_p"])
def test_filters_that_are_left_out_compile_to_nothing(on):
    _, logits, options = tier_case(5000)
    off = Options(options.temperature)
    options = off._replace(**{on: getattr(options, on)})
    filters = knobs.filters_of(options, len(logits))
    t, words = canonical_temperature(filters["temperature"]), heads.keys_of(0, len(logits))[1]
    got, twin, is_kept = both(jnp.asarray(logits), tuple(jnp.asarray(words.T)), t, Filters(**{on: filters[on]}), {}, vocab=5000)
    assert_right(logits, options, got, twin, is_kept, words)


@pytest.mark.slow
def test_bad_rows_are_marked_and_touch_no_other():
    vocab = 5003
    row = (np.random.default_rng(0).normal(size=vocab) * 2).astype(np.float32)
    logits = np.stack([row, np.full(vocab, -np.inf), row, row, row, row, np.where(np.arange(vocab) == 9, row, -np.inf)])
    logits[2, 4999], logits[3, 7], logits[4, [3, 900]] = np.nan, np.inf, np.inf
    for k, p, m in ((40, 0.9, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.2), (4000, 1.0, 0.0)):
        options = Options(1.0, k, p, m)
        got, twin, _, _ = ask(logits, options)
        np.testing.assert_array_equal(np.asarray(got.token) < 0, [False, True, True, True, True, False, False])
        np.testing.assert_array_equal(got.token, twin.token)
        for a in got[1:]:
            np.testing.assert_array_equal(np.isnan(a), np.asarray(got.token) < 0)
        alone, _, _, _ = ask(np.repeat(logits[:1], 7, axis=0), options)
        for a, b in zip(got, alone, strict=True):
            np.testing.assert_array_equal(a[0], b[0])
    t = jnp.array([1.0, np.nan, -1.0, 1.0])
    filters = Filters(jnp.full(4, 5), jnp.full(4, 0.5), jnp.zeros(4))
    words = tuple(jnp.asarray(heads.keys_of(0, 4)[1].T))
    got, twin, _ = both(jnp.tile(jnp.asarray(row), (4, 1)), words, canonical_temperature(t), filters, {}, vocab=vocab)
    np.testing.assert_array_equal(got.token, twin.token)
    assert (np.asarray(got.token) < 0).tolist() == [False, True, True, False]


@pytest.mark.slow
@pytest.mark.parametrize("dtype, vocab_axis", [(jnp.bfloat16, 0), (jnp.float16, 1)])
def test_the_head_is_multiplied(dtype, vocab_axis):
    """Also under vmap, which runs the same kernels once for all."""
    h, w = heads.exact_head(1009, 40, 6, dtype, vocab_axis)
    words = jnp.asarray(heads.keys_of(1, 6)[1])
    filters = Filters(jnp.array([0, 30, 0, 5, 0, 900]), jnp.array([0.9, 1.0, 0.5, 0.9, 1.0, 0.8]), None)
    t, table = jnp.ones(6), {"vocab": 1009, "vocab_axis": vocab_axis, "precision": jax.lax.Precision.HIGHEST}
    want = filtered.draw(h, w, (words[:, 0], words[:, 1]), t, Elementwise(), filters, **table)

    def draw(h, words, t, filters):
        keys = words[:, 0], words[:, 1]
        return triton_filtered.draw(h, w, keys, t, Elementwise(), filters, plt=plt, interpret=True, **table)[0].token

    np.testing.assert_array_equal(jax.jit(draw)(h, words, t, filters), want.token)
    in_two = jax.tree.map(lambda x: x.reshape(2, 3, *x.shape[1:]), (h, words, t, filters))
    np.testing.assert_array_equal(jax.jit(jax.vmap(draw))(*in_two).reshape(6), want.token)


@pytest.mark.slow
def test_a_gap_that_misses_the_end_costs_time_only(monkeypatch):
    """Samples guess; wrong guesses, too high, too low and too wide, leave every kept set as it is."""
    vocab, gaps = 16 * 600, ((3.0, 4.0), (-5.0, -4.0), (-6.0, 6.0), (1.0, 1.0))
    logits = np.tile(np.random.default_rng(1).normal(size=(4, vocab)).round(2) * 2, (4, 1)).astype(np.float32)
    which = np.repeat(np.arange(4), 4)

    def guess(samples, row, by_count, bracket):
        """min_p names the guess."""
        low, high = (sum(jnp.where(row.min_p == jnp.float32(2.0**-(90 + i)), gap[end], 0.0) for i, gap in enumerate(gaps))
                     for end in range(2))
        return low, high

    monkeypatch.setattr(triton_prefix, "undecided_span", guess)
    options = Options(1.0, np.tile([0, 0, 3000, 9000], 4), np.tile([0.9, 0.2, 1.0, 1.0], 4), 2.0**-(90.0 + which))
    got, twin, is_kept, words = ask(logits, options)
    assert_right(logits, options, got, twin, is_kept, words)


def test_sets_larger_than_the_leading_groups():
    """Kept sets in more groups than are listed at first, by some and by thousands of tokens: ties over the bound of those and
    at the end, top_p after top_k, min_p beside top_p, bias and mask by row."""
    vocab = 16 * 1500 - 7
    rng = np.random.default_rng(11)
    x = rng.normal(size=vocab) * 3
    rows = [
        (x, 600, 1.0, 0.0), (x, 0, 0.8, 0.0), (x, 5000, 0.999, 0.0), (x, 20_000, 0.9999, 0.0), (x, 0, 0.97, 1e-4),
        (x.round(1), 900, 1.0, 0.0), (x.round(1), 2500, 0.98, 0.0), (x / 3, 0, 0.9, 0.0), (x / 3, 0, 0.5, 0.01),
        (x / 3, vocab - 1, 1.0, 0.0), (x, 0, 1 - 1e-6, 0.0), (np.minimum(x, 5.0), 900, 0.9, 0.0),
        (np.where(x > 4.0, 4.0, x), 4000, 1.0, 0.0), (x / 3, 0, 1.0, 0.02),
    ]
    logits, k, p, m = (np.stack(a) for a in zip(*rows, strict=True))
    bias = np.zeros_like(logits)
    bias[::2] = rng.integers(-2, 3, vocab) / 4
    mask = rng.random(logits.shape) < np.where(np.arange(len(rows)) % 3 == 0, 0.8, 1.1)[:, None]
    filters = Options(1.0, k, p, m)
    got, twin, is_kept, words = ask(logits, filters, dense={"bias": np.float32(bias), "mask": mask})
    in_groups = np.pad(is_kept, ((0, 0), (0, -vocab % 16))).reshape(len(rows), -1, 16).any(2).sum(1)
    assert np.all(in_groups > triton_shapes.LISTED), in_groups
    assert_right(np.float32(logits), filters._replace(logit_bias=bias, mask=mask), got, twin, is_kept, words)


def test_few_leading_groups_say_nothing_of_lower_tokens():
    """A few groups stand out and hundreds tie below them, so that fewer are listed than are wanted: their lesser tokens are not
    the next ones of the row."""
    vocab = 16 * 700
    ids, groups = np.arange(vocab), np.arange(vocab) // 16
    rng = np.random.default_rng(0)
    rows = []
    for leading in (5, 20, 60):
        is_leading = (groups % 7 == 0) & (groups < 7 * leading)
        x = np.where(ids % 16 == 3, np.where(is_leading, 10 + rng.random(vocab), 5.0), rng.normal(size=vocab) * 0.3)
        rows += [(x, 30, 1.0, 0.0), (x, 100, 1.0, 0.0), (x, 200, 0.9, 0.0), (x, 0, 0.99, 0.0), (x, 0, 0.999, 1e-4)]
    logits, k, p, m = (np.stack(a) for a in zip(*rows, strict=True))
    options = Options(1.0, k, p, m)
    got, twin, is_kept, words = ask(logits, options)
    assert_right(np.float32(logits), options, got, twin, is_kept, words)


def test_ends_at_zero():
    """The number after 0 is subnormal, and zero where such numbers are flushed: as the largest logit of many, as the end."""
    vocab = 16 * 700 + 3
    rng = np.random.default_rng(1)
    x = rng.normal(size=vocab) * 3
    zipf = np.log(1 / (1.0 + rng.permutation(vocab)))
    above = np.where(np.arange(vocab) < 400, 1 + rng.random(vocab), np.minimum(x, 0.0))
    flat = np.minimum(x, 0.0)
    rows = [(flat, 1, 1.0, 0.0), (flat, 255, 0.9, 0.0), (zipf, 256, 1.0, 0.0), (zipf, 300, 1e-9, 0.0),
            (above, 600, 0.9, 0.0), (above, 600, 1 - 1e-6, 0.0)]
    logits, k, p, m = (np.stack(a) for a in zip(*rows, strict=True))
    options = Options(1.0, k, p, m)
    got, twin, is_kept, words = ask(logits, options)
    assert_right(np.float32(logits), options, got, twin, is_kept, words)


@pytest.mark.slow
def test_ends_that_take_the_whole_row():
    """More ties at the end than are written down or ranked, and more tokens than may lie in the span."""
    vocab = 16 * 1000
    rng = np.random.default_rng(12)
    flat, x = np.zeros(vocab), rng.normal(size=vocab)
    few = rng.permutation(np.where(np.arange(vocab) < 3000, 1.0, -x * x))
    rows = [(flat, 0, 0.9, 0.0), (flat, 7000, 0.5, 0.0), (flat, vocab - 1, 1.0, 0.0), (few, 2000, 1.0, 0.0), (few, 0, 0.3, 0.0),
            (x.round(), 9000, 0.9, 0.0), (x.round() * 2, 0, 0.99, 1e-3), (np.where(x > 1, -np.inf, flat), 6000, 0.9, 0.0)]
    logits, k, p, m = (np.stack(a) for a in zip(*rows, strict=True))
    got, twin, is_kept, words = ask(logits, Options(1.0, k, p, m))
    assert np.all(np.asarray(is_kept).sum(1) > 16 * triton_shapes.LISTED / 3)
    assert_right(np.float32(logits), Options(1.0, k, p, m), got, twin, is_kept, words)


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d[0])
@pytest.mark.parametrize("vocab, d_model, rows", [(151_936, 2_048, 1), (50_257, 768, 17), (5, 1, 3)])
def test_every_configuration_lowers(device, vocab, d_model, rows):
    shape = jax.ShapeDtypeStruct
    h, w = shape((rows, d_model), jnp.bfloat16), shape((vocab, d_model), jnp.bfloat16)
    words, number, count = (shape((rows,), kind) for kind in (jnp.uint32, jnp.float32, jnp.int32))
    bias, mask = shape((vocab,), jnp.float32), shape((rows, vocab), jnp.bool_)

    def everything(h, w, words, t, k, bias, mask):
        draw = functools.partial(triton_filtered.draw, h, w, (words, words), t, plt=plt, vocab=vocab)
        return (draw(Elementwise(), Filters(k, t, t)), draw(Elementwise(), Filters(k, None, None)),
                draw(Elementwise(0.5, 30.0, bias, mask), Filters(None, t, None), with_log_probs=True))

    text = lower(everything, device, h, w, words, number, count, bias, mask).as_text()
    assert text.count("__gpu$xla.gpu.triton") >= 12 or text.count("triton") >= 12


def test_the_public_function_runs_them_on_a_gpu():
    shape = jax.ShapeDtypeStruct
    h, w = shape((4, 128), jnp.bfloat16), shape((5120, 128), jnp.bfloat16)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 4))
    chosen = []

    def everything(h, w, keys):
        choose = functools.partial(gumbeljax.choose_implementation, h, w, top_k=5)
        chosen.extend([choose(), choose("xla"), choose("triton"), choose(num_samples=2)])
        for name, options in (("mosaic", {}), ("triton", {"num_samples": 2})):
            with pytest.raises(NotImplementedError, match="top_k, top_p and min_p"):
                gumbeljax.sample(h, w, keys, top_k=5, implementation=name, **options)
        with pytest.raises(NotImplementedError, match="only draws one token per row"):
            gumbeljax.log_prob(h, w, jnp.zeros(4, jnp.int32), top_k=5, implementation="triton")
        mask = jnp.ones(5120, bool)
        return (gumbeljax.sample(h, w, keys, top_k=5, implementation="triton"),
                gumbeljax.sample_with_log_probs(h, w, keys, top_p=0.9, mask=mask, implementation="triton"))

    text = lower(everything, DEVICES[0], h, w, keys).as_text()
    assert chosen == ["triton", "xla", "triton", "xla"] and "gumbeljax_settle" in text


@pytest.mark.parametrize("rows, bias", [(64, False), (64, True), (300, False), (8, False)])
def test_mosaic_makes_the_logits_of_many_rows(rows, bias):
    shape = jax.ShapeDtypeStruct
    h, w, number = shape((rows, 128), jnp.bfloat16), shape((5120, 128), jnp.bfloat16), shape((5120,), jnp.float32)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), rows))

    def draw(h, w, keys, number):
        return gumbeljax.sample(h, w, keys, top_p=0.9, logit_bias=number if bias else None, implementation="triton")

    text = lower(draw, DEVICES[0], h, w, keys, number).as_text()
    by_xla = rows == 8 or bias
    assert ("mosaic_gpu" in text, "dot_general" in text, "gumbeljax_summarise" in text) == (not by_xla, by_xla, by_xla)


@pytest.mark.parametrize("rows", [16, 300])  # so many that programs have several pieces
def test_lowering_in_64_bit_mode(rows):
    with jax.enable_x64(True):
        shape = jax.ShapeDtypeStruct
        f = functools.partial(triton_filtered.draw, plt=plt, vocab=5009)
        words = (shape((rows,), jnp.uint32),) * 2
        h, w, t = (shape(s, jnp.float32) for s in [(rows, 64), (5009, 64), (rows,)])
        draw = lambda h, w, words, t, k: f(h, w, words, t, Elementwise(), Filters(k, t, t))  # noqa: E731
        assert "triton" in lower(draw, DEVICES[0], h, w, words, t, shape((rows,), jnp.int32)).as_text()
