"""Two Markov chains as target and draft, blocks of speculation between them, and the law of what must come out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import gumbeljax
from gumbeljax.speculative import Law, position_keys, verify, verify_coupled
from tests.statistics import chi_square

CHUNK = 20_000


def tables(vocab, seed=0, zeros=True):
    """float32 log transition matrices (target, draft) `[vocab, vocab]`, asymmetric, with some forbidden transitions."""
    rng = np.random.default_rng(seed)
    target = np.log(rng.dirichlet(np.full(vocab, 0.5), vocab) + 1e-3)
    draft = np.log(0.5 * rng.dirichlet(np.ones(vocab), vocab) + 0.5 * np.exp(target))
    if zeros:
        target[0, 1], draft[1, 2], target[2, 0] = -np.inf, -np.inf, -np.inf
    return target.astype(np.float32), draft.astype(np.float32)


def pair_laws(log_target, first, length):
    """For t = 0 .. length - 2: the law `[vocab, vocab]` of tokens t and t + 1 of the target's chain, float64."""
    p = np.exp(np.asarray(log_target, np.float64))
    p /= p.sum(-1, keepdims=True)
    now, out = p[first], []
    for _ in range(length - 1):
        out.append(now[:, None] * p)
        now = now @ p
    return out


def one_hot(tokens, vocab):
    return jax.nn.one_hot(tokens, vocab, dtype=jnp.float32)


def law_at(table, before, route, **options):
    """The law after each of the tokens `before [n, positions]`. From hidden states: h = one-hot, w the table transposed."""
    if route == "logits":
        return Law(table[before], **options)
    finite = jnp.where(table == -jnp.inf, -1e4, table)  # -inf * 0 is NaN in a product; exp(-1e4) is 0
    return Law(one_hot(before, table.shape[0]), finite.T, **options)


def draft_tokens(table, last, keys, draft_len, temperature=1.0):
    """Tokens `[n, draft_len]` of the draft's chain, drawn with the keys of their positions."""
    def draw(last, keys):
        token = gumbeljax.sample_logits(table[last], keys, temperature=temperature)
        return token, token

    return jax.lax.scan(draw, last, jnp.moveaxis(keys[:, :draft_len], 1, 0))[1].T


def put(out, length, tokens, num_accepted):
    """Appends each row's `num_accepted + 1` tokens at its own length."""
    place = length[:, None] + jnp.arange(tokens.shape[1])
    kept = jnp.arange(tokens.shape[1]) <= num_accepted[:, None]
    place = jnp.where(kept, place, out.shape[1])
    return out.at[jnp.arange(len(out))[:, None], place].set(tokens, mode="drop"), length + num_accepted + 1


@functools.partial(jax.jit, static_argnames=("n", "draft_len", "route", "coupled", "blocks"))
def speculate(target, draft, key, *, n, draft_len, route, temperature=1.0, draft_temperature=1.0, coupled=False,
              blocks=2):
    """(tokens `[n, blocks * (draft_len + 1)]`, accepted in each block `[blocks, n]`): some blocks, then plain decoding.

    Drafts, coins and residuals of a request all use the keys of their positions, as a decode loop would.
    """
    total = blocks * (draft_len + 1)

    def of_chunk(key):
        requests = jax.random.split(key, min(n, CHUNK))
        def one_block(carry, _):
            out, length, last = carry
            keys = position_keys(requests, length, draft_len + 1)
            drafted = draft_tokens(draft, last, keys, draft_len, draft_temperature)
            before = jnp.concatenate([last[:, None], drafted], axis=1)
            p = law_at(target, before, route, temperature=temperature)
            if coupled:
                verified = verify_coupled(p, drafted, keys)
            else:
                q = law_at(draft, before[:, :-1], route, temperature=draft_temperature)
                verified = verify(p, q, drafted, keys)
            out, length = put(out, length, verified.tokens, verified.num_accepted)
            return (out, length, out[jnp.arange(len(out)), length - 1]), verified.num_accepted

        zero = jnp.zeros(len(requests), jnp.int32)
        start = jnp.zeros((len(requests), total), jnp.int32), zero, zero
        (out, length, last), accepted = jax.lax.scan(one_block, start, length=blocks)

        def plain(t, carry):
            out, length, last = carry
            token = gumbeljax.sample_logits(target[last], position_keys(requests, length, 1)[:, 0], temperature=temperature)
            out, length = put(out, length, token[:, None], jnp.zeros_like(length))
            return out, length, token

        out, length, last = jax.lax.fori_loop(0, total - blocks, plain, (out, length, last))
        return out, accepted

    out, accepted = jax.lax.map(of_chunk, jax.random.split(key, max(1, n // CHUNK)))
    return out.reshape(-1, total), jnp.moveaxis(accepted, 1, 0).reshape(blocks, -1)


def pair_p_values(tokens, log_target, first=0):
    """p-value of every neighbouring pair of tokens against the target's law; tokens outside the law fail."""
    tokens, vocab = np.asarray(tokens), len(log_target)
    assert tokens.min() >= 0 and tokens.max() < vocab
    found = []
    for t, law in enumerate(pair_laws(log_target, first, tokens.shape[1])):
        counts = np.bincount(tokens[:, t] * vocab + tokens[:, t + 1], minlength=vocab * vocab)
        found.append(chi_square(counts, law.ravel()))
    return found
