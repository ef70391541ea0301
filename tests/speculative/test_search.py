"""The search for the residual's winner along the scores under p: what it decides is what the pass over both tables says."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gumbeljax import _compat
from gumbeljax._keys import row_keys
from gumbeljax.speculative import Law, leviathan, position_keys
from gumbeljax.speculative.law import prepare_law
from pallas_kernels import dual, race, search, triton, triton_search, xla
from pallas_kernels.logits import Elementwise
from pallas_kernels.tiles import TritonTiles, XlaTiles
from tests import heads, oracles
from tests.speculative.test_residual import one_token

plt = _compat.pallas_triton()
needs_triton = pytest.mark.skipif(plt is None, reason="this jax has no Pallas Triton backend")
VOCAB, ROWS, SAMPLE = 1003, 24, leviathan.FROM_TARGET
TILES = TritonTiles(64, 16, 16)
ROUTES = ["xla", pytest.param("triton", marks=needs_triton)]


def laws(kind):
    """(logits of p, of q, temperatures of p, factors) of `ROWS` rows."""
    rng = np.random.default_rng(0)
    p, t = rng.normal(0, 2, (ROWS, VOCAB)), np.ones(ROWS)
    q = p + rng.normal(0, 0.8, p.shape)
    if kind == "peaked":
        p, t = 8 * p, rng.choice([0.3, 1.0, 2.0], ROWS)
        q = p + rng.normal(0, 3, p.shape)
    if kind == "flat and close":  # nearly every group has to be looked at
        p = 1e-2 * p
        q = p + rng.normal(0, 0.03, p.shape)
    if kind == "disjoint":
        half = rng.random(p.shape) < 0.5
        p, q = np.where(half, p, -np.inf), np.where(half, -np.inf, q)
    if kind == "holes":
        p, q = (np.where(rng.random(p.shape) < 0.7, x, -np.inf) for x in (p, q))
    if kind == "equal":
        q = p
    factor = np.where(kind == "chains", rng.uniform(0.2, 3, ROWS), 1.0)
    return tuple(jnp.asarray(x, jnp.float32) for x in (p, q, t, factor))


KINDS = ["close", "peaked", "flat and close", "disjoint", "holes", "equal", "chains"]


def side_of(logits, t, known=None):
    """A law given as logits, or as hidden states whose products are these logits to the last bit."""
    top = jnp.max(logits, axis=1)
    total = jnp.sum(jnp.exp((logits - top[:, None]) / t[:, None]), axis=1)
    token = jnp.argmax(logits, axis=1).astype(jnp.int32) if known is None else known
    own = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
    normalizer = dual.Normalizer(top, total, token, (own - top) / t - jnp.log(total))
    return dual.Side(logits, None, t, Elementwise(), normalizer)


def as_table(side):
    """The same law from hidden states: row i of h picks column i of the table. -inf becomes a mask."""
    is_there = side.h > -jnp.inf
    w = jnp.where(is_there, side.h, 0.0).T
    return side._replace(h=jnp.eye(ROWS), w=w, options=Elementwise(mask=is_there), precision=jax.lax.Precision.HIGHEST)


def keys_of(seed):
    return tuple(jnp.asarray(heads.keys_of(seed, ROWS)[1].T))


def run(route, p, q, factor, keys, wanted=None, **amount):
    """(what the search found, what the pass over both says, scores)."""
    wanted = jnp.ones(ROWS, bool) if wanted is None else wanted
    asked = search.Asked(jnp.arange(ROWS), jnp.arange(ROWS), jnp.where(wanted, factor, 0.0))
    if route == "xla":
        _, scores = xla.scored_piece(p.h, p.w, keys, p.t, p.options, vocab=VOCAB, sample=SAMPLE, tiles=XlaTiles(256))
        found = search.search(scores, p, q, keys, asked, sample=SAMPLE, vocab=VOCAB, **amount)
    else:
        p, q = as_table(p), q if q.h is None else as_table(q)
        _, scores = triton.scored_piece(p.h, p.w, keys, p.t, p.options, plt=plt, vocab=VOCAB, sample=SAMPLE, tiles=TILES,
                                        precision=p.precision, interpret=True)
        found = triton_search.search_rows(scores, p, q, keys, asked, plt=plt, sample=SAMPLE, vocab=VOCAB, shares=4,
                                          interpret=True, **amount)
    return found, dual.residual_draw(p, q, factor, keys, sample=SAMPLE, vocab=VOCAB), scores


FEW, MANY = {"xla": {"num_ids": 128}, "triton": {"most": 4}}, {"xla": {"num_ids": 1024}, "triton": {}}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_decided_is_what_the_pass_over_both_tables_says(kind, route):
    p, q, t, factor = laws(kind)
    p, q = side_of(p, t), side_of(q, jnp.ones(ROWS))
    decided = []
    for amount in (FEW[route], MANY[route]):
        found, (won, token, log_p), _ = run(route, p, q, factor, keys_of(1), **amount)
        yes = np.asarray(found.is_winner())
        decided.append(yes.sum())
        np.testing.assert_array_equal(found.token[yes], token[yes])
        np.testing.assert_allclose(found.log_p[yes], log_p[yes], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose((found.high + found.low)[yes], (won.high + won.low)[yes], rtol=1e-5, atol=1e-5)
        assert np.all(np.asarray(found.mass) <= np.asarray(won.total * jnp.exp(won.top)) * (1 + 1e-4) + 1e-7)
    if kind in ("flat and close", "equal"):
        assert decided[0] < ROWS // 2
    else:
        assert decided[0] <= decided[1] and decided[1] > 0.7 * ROWS
    assert (decided[1] == 0) == (kind == "equal")


@pytest.mark.parametrize("route", ROUTES)
def test_a_draft_without_a_law_and_rows_that_are_not_asked_for(route):
    p, _, t, factor = laws("close")
    p = side_of(p, t)
    wanted = jnp.arange(ROWS) % 2 == 0
    found, (_, token, _), _ = run(route, p, one_token(p.normalizer.token), factor, keys_of(2), wanted)
    yes = np.asarray(found.is_winner() & wanted)
    assert yes.sum() > 0.8 * ROWS / 2
    np.testing.assert_array_equal(found.token[yes], token[yes])
    assert np.all(np.asarray(found.token)[yes] != np.asarray(p.normalizer.token)[yes])


def test_the_best_of_pieces_is_that_of_one_maximum_after_the_other():
    """Ties in high, in low, in all; pieces that found nothing."""
    rng = np.random.default_rng(5)
    few = lambda values, dtype=np.float32: rng.choice(np.asarray(values, dtype), (7, 4000))  # noqa: E731
    high, low, token = few([-np.inf, -1, 0, 3]), few([-1e-8, 0, 1e-8]), few([0, 16, 48, race.NO_ID], np.int32)
    high[:, :500] = -np.inf
    found = search.Found(high, low, token, token.astype(np.float32) / 8, few([0, 0.25, 1]), few([-np.inf, -2, 5]))
    best = search.best_of(search.Found(*map(jnp.asarray, found)))
    want = race.best_score(*map(jnp.asarray, (high, low, token)))
    for x, y in zip(best, (*want, want[2].astype(jnp.float32) / 8, found.mass.sum(0), found.bound.max(0)), strict=True):
        np.testing.assert_array_equal(x, y)


def forget_the_second(groups, winner):
    return jnp.full_like(groups.high[0], -jnp.inf)


def forget_the_bound(self):
    return self.high > -jnp.inf


@needs_triton
def test_gate_sees_a_second_best_that_is_forgotten(monkeypatch):
    """The winner under r may be a group that came second in its tile: rows are then decided wrongly."""
    p, q, t, factor = laws("chains")
    p, q = side_of(p, t), side_of(q, jnp.ones(ROWS))

    def wrongly_decided():
        jax.clear_caches()  # kernels are traced once
        wrong = 0
        for seed in range(4):
            found, (_, token, _), _ = run("triton", p, q, factor, keys_of(seed))
            wrong += int(np.sum(np.asarray(found.is_winner() & (found.token != token))))
        return wrong

    assert wrongly_decided() == 0
    monkeypatch.setattr(race, "second_best", forget_the_second)
    assert wrongly_decided() > 0
    jax.clear_caches()


@pytest.mark.parametrize("route", ROUTES)
def test_scores_equal_the_oracle(route):
    """Of each tile the best score with its group, and the second: float64 of NumPy, rounded as documented."""
    p, _, _, _ = laws("close")
    t = np.random.default_rng(3).choice([0.5, 1.0, 2.0], ROWS).astype(np.float32)
    words = heads.keys_of(4, ROWS)[1]
    _, _, scores = run(route, side_of(p, jnp.asarray(t)), one_token(jnp.zeros(ROWS, jnp.int32)), jnp.ones(ROWS),
                       tuple(jnp.asarray(words.T)))
    check_scores(scores, oracles.group_scores(np.asarray(p), words, t, sample=SAMPLE))


def check_scores(scores, want):
    """`want` `[rows, groups]`: all scores in float64."""
    per_tile = scores.width // 16
    want = np.pad(want, ((0, 0), (0, -want.shape[1] % per_tile)), constant_values=-np.inf)
    want = want.reshape(len(want), -1, per_tile).swapaxes(0, 1)  # [tiles, rows, groups]
    order = np.sort(want, axis=-1)
    told = np.asarray(scores.told)[:len(want), :want.shape[1]]
    if told.dtype == np.float16:
        return np.testing.assert_allclose(told.astype(np.float64), order[..., -1], rtol=2.0**-11 + 1e-6, atol=1e-4)
    best, second, number = map(np.asarray, race.untold(jnp.asarray(told)))
    np.testing.assert_array_equal(number, want.argmax(-1))
    assert np.all(best >= order[..., -1] - 2e-5)  # bounds, and not far from it
    np.testing.assert_allclose(best, order[..., -1], rtol=2.0**-11, atol=2e-5)
    if per_tile > 1:
        gap = order[..., -1] - order[..., -2]
        assert np.all(second >= order[..., -2] - 2e-5)
        assert np.all((second <= order[..., -2] + 2.0**-11 * np.abs(best) + gap / 5 + 2e-5) | ~np.isfinite(gap))


def test_what_is_told_of_a_tile():
    """Bounds from above, for scores of all sizes and signs, and gaps of all sizes."""
    rng = np.random.default_rng(0)
    best = np.float32(rng.choice([-1, 1], 20_000) * 10.0**rng.uniform(-6, 6, 20_000))
    second = best - np.float32(10.0**rng.uniform(-8, 8, 20_000)) * rng.integers(0, 2, 20_000).astype(np.float32)
    best[:2], second[:3] = -np.inf, -np.inf
    number = rng.integers(0, 16, 20_000).astype(np.int32)
    bound, bound_of_second, which = map(np.asarray, race.untold(race.told(*map(jnp.asarray, (best, second, number)))))
    np.testing.assert_array_equal(which, number)
    assert (bound[:2] == -np.inf).all() and (bound_of_second[:2] == -np.inf).all() and bound_of_second[2] < -1e13
    best, second, bound, bound_of_second = (x[3:].astype(np.float64) for x in (best, second, bound, bound_of_second))
    assert np.all(bound >= best) and np.all(bound <= best + 2.0**-11 * np.abs(best))
    assert np.all(bound_of_second >= second - 2.0**-22 * np.abs(second))  # the last difference is rounded
    assert np.all(bound_of_second <= second + (best - second) / 5 + 2.0**-11 * np.abs(best) + 2.0**-19)


def first_tokens(log_p, log_q, key, *, n, vocab):
    """(first token, undecided) of n blocks of one drafted token."""
    keys = position_keys(jax.random.split(key, n), 0, 2)
    drafted = jax.random.categorical(jax.random.fold_in(key, 1), jnp.broadcast_to(log_q, (n, vocab)))
    sides = [prepare_law(Law(jnp.broadcast_to(x, (n, k, vocab))), "law") for x, k in ((log_p, 2), (log_q, 1))]
    words = tuple(x.reshape(n, 2) for x in row_keys(keys, (n, 2)))
    unjitted = leviathan.verify_drafts.__wrapped__  # traced here, so that it sees the constants of the test
    out = unjitted(sides[0][0], sides[1][0], drafted[:, None, None], jnp.ones((n, 1), jnp.int32), words,
                   target_config=sides[0][1], draft_config=sides[1][1])
    return out.tokens[:, 0], out.undecided


def test_a_short_search_changes_no_token_and_a_wrong_one_does(monkeypatch):
    """Verification with a search of all groups, of one, and of one that is taken for the winner."""
    n, vocab = 20_000, 160
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.full(vocab, 0.5))
    q = 0.6 * rng.dirichlet(np.full(vocab, 1.0)) + 0.4 * p
    laws = [jnp.asarray(np.log(x), jnp.float32) for x in (p, q)]

    def draw():
        return jax.jit(functools.partial(first_tokens, n=n, vocab=vocab))(*laws, jax.random.key(0))

    whole, undecided = draw()
    assert not undecided.any()
    for name, value in ((search, "IDS"), 16), ((xla, "WIDTH"), 16):
        monkeypatch.setattr(*name, value)
    short, undecided = draw()
    assert 0.05 * n < int(undecided.sum()) < 0.5 * n
    np.testing.assert_array_equal(short, whole)
    monkeypatch.setattr(search.Found, "is_winner", forget_the_bound)
    wrong, _ = draw()
    assert (wrong != whole).mean() > 0.02
