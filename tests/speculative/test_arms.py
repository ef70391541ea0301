"""Whoever chooses the drafts, and however: the output follows the target's law, as long as the choice sees only the past."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gumbeljax
from gumbeljax import bandit
from gumbeljax.speculative import Law, position_keys, verify, verify_coupled
from tests.speculative import markov, mutants
from tests.statistics import ALPHA, chi_square, tuple_counts

VOCAB, LENGTH = 3, 5
DRAFT_LENS = np.array([1, 3, 2])
TARGET = markov.tables(VOCAB)[0]
# A fair draft, one that loves what the target dislikes, and one that follows the token before it.
DRAFTS = np.stack([markov.tables(VOCAB)[1], np.maximum(-TARGET, -4.0).clip(max=4.0), np.float32(2) * np.eye(VOCAB, dtype="f4")])
POLICY = bandit.ucb1(bandit.Arms(draft_len=DRAFT_LENS, cost=[1.0, 1.3, 1.2]))


def from_the_past(blocks, state, last, num_accepted, keys):
    """An adversary: from the bandit's wish, the last token, what was accepted and the keys that have been used."""
    bits = jax.random.key_data(keys)[:, 0] % jnp.uint32(2)
    return (jax.vmap(POLICY.select, (0, None))(state, None) + last + num_accepted + bits.astype(jnp.int32)) % len(DRAFTS)


def whatever_is_accepted(blocks, *past):
    """No choice at all: it looks at the coins of this block, and takes the draft of which most is kept."""
    return jnp.argmax(jnp.stack([verified.num_accepted for verified in blocks]), axis=0)


def redrawn_once(blocks, *past):
    """The same in its smallest form: where the first draft is rejected at once, another one is tried with the same keys."""
    return jnp.where(blocks[0].num_accepted == 0, 2, 0)


@functools.partial(jax.jit, static_argnames=("n", "choose", "coupled"))
def speculate(key, *, n, choose, coupled=False):
    """(tokens `[n, LENGTH]`, how often each arm was played): one loop, with n bandits in its carry."""
    requests = jax.random.split(key, n)
    longest, drafts, lens = int(DRAFT_LENS.max()), jnp.asarray(DRAFTS), jnp.asarray(DRAFT_LENS)

    def one_arm(arm, last, keys):
        def draw(last, keys):
            token = gumbeljax.sample_logits(drafts[arm, last], keys)
            return token, token

        drafted = jax.lax.scan(draw, last, jnp.moveaxis(keys[:, :longest], 1, 0))[1].T
        before = jnp.concatenate([last[:, None], drafted], axis=1)
        p, q = Law(jnp.asarray(TARGET)[before]), Law(drafts[arm[:, None], before[:, :-1]])
        if coupled:
            return verify_coupled(p, drafted, keys, draft_lens=lens[arm])
        return verify(p, q, drafted, keys, draft_lens=lens[arm])

    def one_block(carry, _):
        out, length, last, state, num_accepted = carry
        keys = position_keys(requests, length, longest + 1)
        used = position_keys(requests, length - 1, 1)[:, 0]
        looks_ahead = choose is not from_the_past
        blocks = [one_arm(jnp.full(n, arm), last, keys) for arm in range(len(DRAFTS))] if looks_ahead else None
        arm = choose(blocks, state, last, num_accepted, used)
        verified = one_arm(arm, last, keys)
        state = jax.vmap(POLICY.update)(state, arm, verified.num_accepted, lens[arm])
        out, length = markov.put(out, length, verified.tokens, verified.num_accepted)
        last = jnp.take_along_axis(verified.tokens, verified.num_accepted[:, None], axis=1)[:, 0]
        return (out, length, last, state, verified.num_accepted), jnp.bincount(arm, length=len(DRAFTS))

    zero = jnp.zeros(n, jnp.int32)
    state = jax.tree.map(lambda x: jnp.broadcast_to(x, (n, *x.shape)), POLICY.init())
    carry = jnp.zeros((n, LENGTH), jnp.int32), zero, zero, state, zero
    carry, played = jax.lax.scan(one_block, carry, length=LENGTH)  # a block has a token at least
    return carry[0], played.sum(0)


def law_holds(tokens):
    """Chi-square of the joint law of the first four tokens, enumerated, and of every pair of neighbours."""
    p = mutants.softmax(TARGET)
    law = {ids: p[0, ids[0]] * np.prod([p[a, b] for a, b in itertools.pairwise(ids)])
           for ids in np.ndindex(*[VOCAB] * 4)}
    return min(chi_square(*tuple_counts(tokens[:, :4], law)), *markov.pair_p_values(tokens, TARGET)) > ALPHA


@pytest.mark.parametrize("choose", [from_the_past, whatever_is_accepted, redrawn_once])
def test_the_law_does_not_depend_on_the_choice(choose):
    """60,000 runs of five tokens. A choice after a look at the acceptance is none, and the gate sees it."""
    tokens, played = map(np.asarray, speculate(jax.random.key(1), n=60_000, choose=choose))
    assert (played > 1000).sum() >= 2
    assert law_holds(tokens) == (choose is from_the_past)


@pytest.mark.parametrize("choose", [from_the_past, whatever_is_accepted])
def test_coupled_tokens_do_not_depend_on_the_choice(choose):
    """Every token of 400 runs is that of plain decoding, even if the choice knows the noise to come."""
    key, n = jax.random.key(2), 400
    tokens, played = map(np.asarray, speculate(key, n=n, choose=choose, coupled=True))
    requests, last = jax.random.split(key, n), jnp.zeros(n, jnp.int32)
    for t in range(LENGTH):
        last = gumbeljax.sample_logits(jnp.asarray(TARGET)[last], position_keys(requests, t, 1)[:, 0])
        np.testing.assert_array_equal(tokens[:, t], last)
    assert (played > 100).all()
