"""The search for the kept set: on every path the set of a sort in float64, and in every row that has ends, ties or no law."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gumbeljax
from pallas_kernels import filtered
from pallas_kernels.kept import Filters, ordered_keys
from pallas_kernels.kept_set import LEADING, Prefix, kept_set, prefix_of
from pallas_kernels.logits import Elementwise
from pallas_kernels.whole_rows import UNDECIDED
from tests import filter_oracle as oracle
from tests import heads, knobs, oracles
from tests.filter_oracle import Options

# The paths of the search


def tier_case(vocab):
    """Rows whose kept sets fit the first candidates, need more of them, and need the whole vocabulary."""
    rng = np.random.default_rng(vocab)
    normal = np.round(rng.normal(size=vocab) * 16) / 8
    peaked = np.where(rng.random(vocab) < 0.001, 12.0, 0.0)
    rows = [
        ("sharp", normal * 4, 0, 0.9, 0.0),
        ("k 50", normal, 50, 1.0, 0.0),
        ("k 50, p", normal, 50, 0.9, 0.0),
        ("k 65", normal, 65, 1.0, 0.0),
        ("k 1025, p", normal, 1025, 0.95, 0.0),
        ("k V-1", normal, vocab - 1, 1.0, 0.0),
        ("flat", normal * 0, 0, 0.9, 0.0),
        ("tied", normal * 0, 100, 0.5, 0.0),
        ("p 1-1e-6", normal, 0, 1 - 1e-6, 0.0),
        ("p tiny", normal, 0, 1e-12, 0.0),
        ("p 0", normal, 5, 0.0, 0.0),
        ("m", normal, 0, 1.0, 0.05),
        ("all", normal, 2000, 0.8, 0.1),
        ("peaked", peaked, 0, 0.9, 0.0),
        ("greedy", normal, 40, 0.9, 0.0),
        ("signs of 0", np.where(rng.random(vocab) < 0.5, 0.0, -0.0), 70, 0.3, 0.0),
    ]
    names, logits, k, p, m = (list(a) for a in zip(*rows, strict=True))
    t = np.where([n == "greedy" for n in names], 0.0, 1.0)
    return names, np.stack(logits).astype(np.float32), Options(t, np.array(k), np.array(p), np.array(m))


@jax.jit
def together(logits, keys, filters):
    """(kept set, draw)"""
    h, w = knobs.logits_head(logits)
    return gumbeljax.kept_tokens(h, w, **filters), gumbeljax.sample_with_log_probs(h, w, keys, **filters)


@pytest.mark.parametrize("vocab", [2049, 33_000])
def test_every_path_finds_the_same_set(vocab):
    """Alone, a row takes the path that it needs; beside the others it takes the longest. Set, token and log-probs do not
    change, and are the oracle's."""
    names, logits, options = tier_case(vocab)
    rows = len(names)
    keys, words = heads.keys_of(0, rows)
    filters = knobs.filters_of(options, rows)
    kept, out = together(logits, keys, filters)
    knobs.assert_kept(np.asarray(kept), logits.astype(np.float64), options)
    heads.assert_pathwise(out.token, np.where(kept, logits, -np.inf), words, options.temperature)
    for i in range(rows):
        alone = jax.tree.map(lambda a, i=i: jnp.repeat(a[i : i + 1], rows, 0), (jnp.asarray(logits), keys, filters))
        own_kept, own = together(*alone)
        np.testing.assert_array_equal(own_kept[0], kept[i], names[i])
        for a, b in zip(own, out, strict=True):
            np.testing.assert_array_equal(a[0], b[i], names[i])


@pytest.mark.parametrize("on, platform", [  # with top_k it is one program everywhere
    ("top_k", "cpu"), ("top_p", "cpu"), ("top_p", "default"), ("top_k+top_p", "cpu")])
def test_whole_rows_and_leading_groups_give_one_set(on, platform, monkeypatch):
    """A CPU's way to search for top_p alone and that of others, and what is searched where the leading groups do not do."""
    names, logits, options = tier_case(5000)
    assert logits.shape[1] > oracles.GROUP * max(LEADING, UNDECIDED)
    options = Options(options.temperature, **{name: getattr(options, name) for name in on.split("+")})
    given = knobs.filters_of(options, len(names))
    t, filters = given["temperature"], Filters(**{name: given[name] for name in on.split("+")})
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda **ways: ways[platform]())
    whole = np.asarray(jax.jit(kept_set)(jnp.asarray(logits.T), t, filters)).T
    knobs.assert_kept(whole, logits.astype(np.float64), options)
    alone = jax.jit(lambda *row: kept_set(*row))
    for i in range(len(names)):
        row = jnp.asarray(logits[i : i + 1].T), t[i : i + 1], jax.tree.map(lambda a, i=i: a[i : i + 1], filters)
        np.testing.assert_array_equal(np.asarray(alone(*row))[:, 0], whole[i], names[i])


def test_a_neighbour_changes_no_bit():
    """Rows 1 to 3 become zeros, huge, NaN, masked; row 0 keeps token, log-probs and set (the path changes under it)."""
    vocab = 2100
    rng = np.random.default_rng(0)
    row = (rng.normal(size=vocab) * 4).astype(np.float32)
    keys, _ = heads.keys_of(0, 4)
    others = {
        "like it": row,
        "zeros": 0 * row,
        "huge": 1e4 * row,
        "nan": np.nan * row,
        "inf": np.where(row > 8, np.inf, row),
        "masked": np.full(vocab, -np.inf),
    }
    options = knobs.filters_of(Options(0.8, [40, 0, 0, 0], 0.9, [0.01, 0, 0, 0]))

    @jax.jit
    def ask(bias):
        h, w = jnp.zeros((4, 16)), jnp.zeros((vocab, 16))
        return (
            gumbeljax.sample_with_log_probs(h, w, keys, logit_bias=bias, **options),
            gumbeljax.kept_tokens(h, w, logit_bias=bias, **options),
        )

    answers = {name: jax.tree.map(lambda a: np.asarray(a[0]), ask(np.stack([row, x, x, x]))) for name, x in others.items()}
    for name, got in answers.items():
        assert int(got[0].token) >= 0
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(answers["like it"]), strict=True):
            np.testing.assert_array_equal(a, b, name)


def test_batch_size_slot_and_vmap_change_nothing():
    """Under vmap a row's choice of path is its own."""
    names, logits, options = tier_case(2049)
    everything = logits, heads.keys_of(0, len(names))[0], knobs.filters_of(options, len(names))
    kept, out = together(*everything)
    backwards = jax.tree.map(lambda x: x[::-1], everything)
    np.testing.assert_array_equal(together(*backwards)[0], kept[::-1])
    np.testing.assert_array_equal(together(*backwards)[1].token, out.token[::-1])
    few = jax.tree.map(lambda x: x[5:8], everything)
    np.testing.assert_array_equal(together(*few)[0], kept[5:8])
    one = lambda x, key, filters: gumbeljax.sample_logits(x, key, **filters)  # noqa: E731
    np.testing.assert_array_equal(jax.jit(jax.vmap(one))(*few), out.token[5:8])


# The search itself


def test_keys_are_in_the_order_of_the_logits():
    x = np.array([-np.inf, -3e38, -1.0, -1e-30, -0.0, 0.0, 1e-30, 1.0, 3e38, np.inf], np.float32)
    keys = np.asarray(ordered_keys(x))
    assert np.all(np.diff(keys)[np.arange(9) != 4] > 0) and keys[4] == keys[5]
    assert ordered_keys(jnp.float32(np.nan)) < keys[0]


@pytest.mark.parametrize("vocab", [100, 2064])
def test_signs_of_zero_are_one_number(vocab):
    """A product of matrices loses the sign, so these logits go in as they are. Whole groups are -0.0, those after them 0.0."""
    logits = np.stack([np.where(np.arange(vocab) < vocab // 2, -0.0, 0.0), np.where(np.arange(vocab) % 3 > 0, 0.0, -0.0)])
    for k, p in ((50, 1.0), (64, 0.5), (0, 0.25)):
        filters = Filters(jnp.full(2, k), jnp.full(2, p), jnp.zeros(2))
        kept = np.asarray(jax.jit(kept_set)(jnp.asarray(logits.T, jnp.float32), jnp.ones(2), filters)).T
        size = kept[0].sum()
        assert abs(size - (k or vocab) * p) <= 1 and kept[:, :size].all() and not kept[:, size:].any()
    tokens = gumbeljax.sample_logits(jnp.tile(jnp.asarray(logits[:1], jnp.float32), (200, 1)), jax.random.key(0), top_k=50)
    assert tokens.max() < 50 and len(set(tokens.tolist())) > 30


@pytest.mark.parametrize("vocab", [1, 2, 37, 64])
def test_every_prefix_can_be_asked_for(vocab):
    """top_k = 1, 2, ... V, as the rows of one call, on tied logits."""
    logits = np.random.default_rng(vocab).integers(0, 3, vocab).astype(np.float32)
    h, w = heads.pinned_head(logits, rows=vocab)
    kept = np.asarray(gumbeljax.kept_tokens(h, w, top_k=np.arange(1, vocab + 1)))
    for k in range(1, vocab + 1):
        assert sorted(np.flatnonzero(kept[k - 1])) == sorted(oracle.descending(logits)[:k])


def test_all_masked_and_bad_rows_keep_nothing():
    logits = np.zeros((6, 50), np.float32)
    logits[1], logits[2, 7], logits[3, 7], logits[4, [3, 9]] = -np.inf, np.nan, np.inf, np.inf
    head = jnp.zeros((6, 16)), jnp.zeros((50, 16))

    @jax.jit
    def ask(t, filters):
        options = filters | {"temperature": t, "logit_bias": logits}
        return (
            gumbeljax.sample(*head, jax.random.key(0), **options),
            gumbeljax.kept_tokens(*head, **options),
            gumbeljax.processed_log_probs(*head, **options),
            gumbeljax.top_log_probs(*head, 3, tokens=jnp.zeros(6, jnp.int32), **options),
        )

    marked = np.array([False, True, True, True, True, False])
    on, off = {"top_k": 5, "top_p": 0.5, "min_p": 0.5}, {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    for filters in (*(off | {name: on[name]} for name in on), on, off):
        filters = {name: jnp.full(6, x) for name, x in filters.items()}
        for t in (1.0, 0.0):
            token, kept, log_probs, top = jax.tree.map(np.asarray, ask(t, filters))
            np.testing.assert_array_equal(token == -1, marked)
            np.testing.assert_array_equal(kept.any(1), ~marked)
            np.testing.assert_array_equal(np.isnan(log_probs).all(1), marked)
            assert (top.tokens[marked] == -1).all() and (top.rank[marked] == 0).all() and (top.rank[~marked] == 1).all()


def test_traced_bad_numbers_mark_their_row():
    h, w = heads.exact_head(100, 16, 6)
    off = knobs.filters_of(Options(), 6)
    draw = jax.jit(lambda filters: gumbeljax.sample(h, w, jax.random.key(0), **filters))
    shares = jnp.array([0.5, -0.1, 1.1, jnp.nan, jnp.inf, 0.0])
    for name in ("top_p", "min_p"):
        np.testing.assert_array_equal(draw(off | {name: shares}) == -1, [False, True, True, True, True, False])
        with pytest.raises(ValueError, match=rf"^{name} must be between 0 and 1"):
            gumbeljax.sample(h, w, jax.random.key(0), **{name: np.asarray(shares)})
    counts = jnp.array([1, -1, 0, -2, -(2**31), 5])
    np.testing.assert_array_equal(draw(off | {"top_k": counts}) == -1, [False, False, False, True, True, False])
    for k in (-2, np.array([1, 1, 1, 1, 1, -5])):
        with pytest.raises(ValueError, match=r"^top_k must be at least -1"):
            gumbeljax.sample(h, w, jax.random.key(0), top_k=k)
    with pytest.raises(TypeError, match=r"^top_k must be an integer"):
        gumbeljax.sample(h, w, jax.random.key(0), top_k=5.0)


def test_a_wide_top_k_does_not_wrap():
    h, w = heads.pinned_head(np.arange(10.0), rows=2)
    for k in (np.full(2, 2**32 + 1), np.full(2, 2**31, np.uint32), np.full(2, 2**32 - 1, np.uint32), np.int64(2**40)):
        assert np.asarray(gumbeljax.kept_tokens(h, w, top_k=k)).all(), k


def race_case():
    """Rows whose kept sets lie in the leading groups, and rows whose do not, or that have no law."""
    vocab, rng = 4992, np.random.default_rng(4)
    logits = np.round(rng.normal(size=(7, vocab)) * 64) / 32
    logits[1] = np.where(np.arange(vocab) % 16 == 3, 4.0, logits[1] / 8)  # the maxima of all groups are tied
    groups = logits.reshape(7, -1, 16).max(2)
    logits[2, 16 * np.argmin(groups[2])] = np.nan
    logits[3, 4991], logits[4] = np.inf, -np.inf
    filters = Filters(jnp.array([50, 400, 50, 50, 50, 0, 2000], jnp.int32), None, jnp.full(7, 1e-3))
    return logits.astype(np.float32), filters


def raced(logits, filters):
    _, words = heads.keys_of(2, len(logits))
    return jax.jit(lambda x: filtered.draw(x, None, tuple(words.T), jnp.ones(len(logits)), Elementwise(), filters,
                                           vocab=logits.shape[1], with_log_probs=True))(logits), words


def test_the_race_in_the_leading_groups_is_that_in_all():
    logits, filters = race_case()
    prefix = prefix_of(jnp.asarray(logits.T), jnp.ones(len(logits)), filters)
    np.testing.assert_array_equal(prefix.is_in_leading(), [True, False, True, False, False, False, False])
    out, words = raced(logits, filters)
    kept = np.asarray(kept_set(jnp.asarray(logits.T), jnp.ones(len(logits)), filters)).T
    lawful = np.array([True, True, False, False, False, True, True])
    np.testing.assert_array_equal(out.token[~lawful], -1)
    heads.assert_pathwise(out.token[lawful], np.where(kept, logits, -np.inf)[lawful], words[lawful])
    for i in np.flatnonzero(lawful):
        mass, everything = (np.exp(logits[i].astype(np.float64))[chosen].sum() for chosen in (kept[i], slice(None)))
        np.testing.assert_allclose(out.processed_log_prob[i], logits[i, out.token[i]] - np.log(mass), atol=2e-6)
        np.testing.assert_allclose(out.log_kept_mass[i], np.log(mass / everything), atol=4e-6)


def test_gate_sees_a_race_in_too_few_groups(monkeypatch):
    """Where the kept set ends below the maxima of other groups; and a NaN that does not make its group lead."""
    case = race_case()
    want = raced(*case)[0].token
    monkeypatch.setattr(Prefix, "is_in_leading", lambda self: self.top < jnp.inf)
    assert raced(*case)[0].token[1] != want[1]
    monkeypatch.undo()
    monkeypatch.setattr(jnp, "isnan", lambda x: jnp.zeros_like(x, bool))
    assert raced(*case)[0].token[2] != -1 == want[2]
