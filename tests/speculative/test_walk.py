"""One chain in one launch behind two passes: token for token what the plain code says."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gumbeljax import _compat
from gumbeljax._call import Config
from gumbeljax._implementation import Stages
from gumbeljax._keys import row_keys
from gumbeljax.speculative import Law, leviathan
from gumbeljax.speculative.law import check_drafts, prepare_law
from pallas_kernels import search, triton, triton_dual, triton_search, triton_walk
from pallas_kernels.tiles import TritonTiles
from tests.heads import exact_head

plt = _compat.pallas_triton()
pytestmark = pytest.mark.skipif(plt is None, reason="this jax has no Pallas Triton backend")
REQUESTS, VOCAB, WIDTH, DRAFT_WIDTH = 24, 205, 48, 32


def interpreted(self, shares=4):
    """The stages of Triton under its interpreter."""
    passes = (triton.draw, triton.piece, triton.stage1_mass, triton.stage1_groups, triton.scored_piece,
              triton_dual.residual_draw, triton_dual.residual_mass)
    tiled = {"plt": plt, "tiles": TritonTiles(64, 16, 16), "interpret": True}
    passes = (functools.partial(f, **tiled) for f in passes)
    search, verify = (functools.partial(f, plt=plt, shares=shares, interpret=True)
                      for f in (triton_search.search_rows, triton_walk.verify_chain))
    pieces = {f.__name__: functools.partial(f, **tiled) for f in (triton.race_pieces, triton.mass_pieces)}
    return Stages(*passes, search, verify_chain=verify, **pieces)


def case(draft_len, kind, vocab_axis=0):
    """(target, draft, drafted tokens, lengths): exact logits, so that log-probabilities differ by rounding alone."""
    rng = np.random.default_rng(draft_len)
    rows = REQUESTS * (draft_len + 1)
    h, w = exact_head(VOCAB, WIDTH, rows, jnp.float32)
    h = 2 * h.reshape(REQUESTS, draft_len + 1, WIDTH)
    draft_h, draft_w = h[:, :-1, :DRAFT_WIDTH], w[:, :DRAFT_WIDTH]
    options, draft_options = {}, {}
    if kind == "options":
        mask = jnp.asarray(rng.random((REQUESTS, draft_len + 1, VOCAB)) < 0.8).at[..., 0].set(True)
        temperature = rng.choice([0.0, 0.5, 1.0, 2.0], (REQUESTS, draft_len + 1)).astype(np.float32)
        options = {"mask": mask, "temperature": temperature, "soft_cap": 30.0, "valid_vocab": 200}
        draft_options = {"logit_bias": jnp.asarray(rng.normal(0, 1, VOCAB), jnp.float32), "valid_vocab": 200,
                         "temperature": temperature[:, :-1]}
    if kind == "cold":  # the drafted token is often the one that p draws, whose log-probability is known to the last bit
        temperature = rng.choice([0.0, 0.03, 0.1, 0.3], (REQUESTS, draft_len + 1)).astype(np.float32)
        options, draft_options = {"temperature": temperature}, {"temperature": temperature[:, :-1]}
    if kind in ("cold", "equal"):
        draft_h, draft_w = h[:, :-1], w
    logits = jnp.einsum("rkd,vd->rkv", draft_h, draft_w, precision="highest")
    w, draft_w = (x.T if vocab_axis else x for x in (w, draft_w))
    p = Law(h.at[3, 1, 0].set(jnp.nan), w, vocab_axis=vocab_axis, **options)  # one row without a law
    q = None if kind == "one token" else Law(draft_h, draft_w, vocab_axis=vocab_axis, **draft_options)
    if kind == "cold":
        logits /= jnp.maximum(temperature[:, :-1, None], 1e-6)
    drafted = jax.random.categorical(jax.random.key(2), logits).astype(jnp.int32)
    drafted = drafted.at[5, 0].set(-1).at[6, -1].set(VOCAB)
    lens = jnp.asarray(rng.integers(0, draft_len + 1, REQUESTS)) if kind == "ragged" else None
    return p, q, drafted, lens


def verify(p, q, drafted, lens, key):
    """`verify_drafts`, traced here."""
    target, p_config, shape = prepare_law(p, "target")
    draft, q_config, _ = prepare_law(q, "draft") if q is not None else (None, None, None)
    drafts = check_drafts(drafted, lens, shape, chains=False)
    words = tuple(x.reshape(shape) for x in row_keys(key, shape))
    return leviathan.verify_drafts.__wrapped__(target, draft, drafts.tokens, None if lens is None else drafts.lens, words,
                                               target_config=p_config, draft_config=q_config)


@pytest.mark.parametrize("draft_len, kind, vocab_axis", [
    (4, "plain", 0), (3, "plain", 1), (1, "plain", 0), (4, "options", 0), (5, "ragged", 0), (4, "one token", 0), (4, "cold", 0),
    (3, "equal", 0)])
def test_the_kernels_say_what_the_plain_code_says(draft_len, kind, vocab_axis, monkeypatch):
    arguments = case(draft_len, kind, vocab_axis)
    wants = [verify(*arguments, jax.random.key(seed)) for seed in range(3)]
    monkeypatch.setattr(Config, "stages", interpreted)
    run = jax.jit(lambda key: verify(*arguments, key))
    for seed, want in enumerate(wants):
        got = run(jax.random.key(seed))
        np.testing.assert_array_equal(got.tokens, want.tokens)
        np.testing.assert_array_equal(got.num_accepted, want.num_accepted)
        np.testing.assert_allclose(got.log_probs, want.log_probs, rtol=1e-5, atol=2e-5)
    accepted = np.asarray([want.num_accepted for want in wants])
    assert accepted.sum() > 0 and (accepted == 0).any() and (np.asarray(wants[0].tokens)[3] == -1).any()
    if draft_len == 1:  # all of a draft too
        assert (accepted == draft_len).any()
    if kind == "cold":
        assert (accepted == draft_len).mean() > 0.5
    if kind == "equal":  # what is not accepted is what cannot be: p and q are one law
        assert (np.delete(accepted, (3, 5, 6), axis=1) == draft_len).all()


def kept_from(shares, kind, monkeypatch, **changed):
    """(what kernels say with so many programs a request, what the plain code says) of one key."""
    arguments = case(3, kind)
    want = verify(*arguments, jax.random.key(1))
    jax.clear_caches()  # kernels are traced once
    monkeypatch.setattr(Config, "stages", functools.partialmethod(interpreted, shares=shares))
    for name, value in changed.items():
        monkeypatch.setattr(triton_walk, name, value)
    return jax.jit(lambda key: verify(*arguments, key))(jax.random.key(1)), want


@pytest.mark.parametrize("shares", [1, 16])
def test_the_number_of_programs_and_of_pieces_at_a_time_changes_no_token(shares, monkeypatch):
    got, want = kept_from(shares, "plain", monkeypatch, PIECES=4)  # of four pieces one at a time
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_allclose(got.log_probs, want.log_probs, rtol=1e-5, atol=2e-5)


def test_where_what_is_left_of_p_is_rounding_the_token_is_that_drawn_from_p(monkeypatch):
    """Here, everywhere."""
    monkeypatch.setattr(search, "NEGLIGIBLE", 2.0)
    got, want = kept_from(4, "plain", monkeypatch)
    np.testing.assert_array_equal(got.tokens, want.tokens)


def test_gate_sees_cold_rows_whose_own_token_is_not_known(monkeypatch):
    got, want = kept_from(4, "cold", monkeypatch, WARM=0.0)
    assert (np.asarray(got.tokens) != np.asarray(want.tokens)).any()
