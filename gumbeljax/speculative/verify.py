r"""Lossless verification: the output follows the target's law, whatever the draft.

**One chain.** At a position with target law p and draft law q, the drafted token x is kept with probability
min(1, p(x) / q(x)), else replaced by a draw from the residual law, proportional to max(p - q, 0). Then

.. math:: q(x) \min(1, p(x) / q(x)) + \Bigl(1 - \sum_y \min(p, q)(y)\Bigr)
          \frac{\max(p - q, 0)(x)}{\sum_y \max(p - q, 0)(y)} = \min(p, q)(x) + \max(p - q, 0)(x) = p(x) .

The first rejection ends the block: what was drafted after it hung on a token that is not there. After a draft that was
kept as a whole one more token, the bonus, comes from p. So K drafted tokens yield 1 to K + 1 tokens.

**Several chains.** Of N chains drawn independently from one prefix, those that agree with the tokens kept so far are tried
one after the other, each against what the rejections before it have left of the target: after m of them a law
proportional to :math:`\max(p - C_m q, 0)`, with

.. math:: C_0 = 0, \qquad C_{m+1} = C_m + R_m, \qquad R_m = \sum_v \max(p - C_m q, 0)(v) .

A position is thus described by N numbers, and all N chains are rejected there with probability :math:`R_N`.

**From hidden states** nothing of the size `[rows, draft_len, vocab]` is made. One pass over each table, over all its
positions at once, gives the normalisers and with them the log-probabilities of the drafted tokens; the pass over the
target's table also draws one token from p at each position, and keeps a few bytes for every tile of the vocabulary. Where
the draft ends, that token is the bonus. Where a draft is rejected, the token is the winner of a race over the residual r <= p
with the same noise, in which no group of tokens can score more than it did in p's: so the groups that scored best there are
looked at again, until the best score under r is above what is left (A* sampling). XLA code, and a shard of a vocabulary, look
at some groups only, and rows that they do not decide pay for a pass over both tables, at their one position, which finds the
token that a longer search would have found.

Noise: coins, draws from the target and draws of drafts have streams of their own under the key of the position, so drafts may
have been drawn with the same keys. (The bonus and the draw from the residual share a stream: a position has one or the other.)

Sources: Y. Leviathan, M. Kalman, Y. Matias, "Fast inference from transformers via speculative decoding", ICML 2023;
C. Chen et al., "Accelerating large language model decoding with speculative sampling", arXiv 2302.01318; X. Miao et al.,
"SpecInfer", ASPLOS 2024 (several chains); C. J. Maddison, D. Tarlow, T. Minka, "A* sampling", NeurIPS 2014.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp

from gumbeljax._call import plain_broadcasting
from gumbeljax._keys import row_keys
from gumbeljax._mesh import check_rows
from gumbeljax._typing import Array, ArrayLike, Key
from gumbeljax.speculative import coupled, cut, leviathan, stored
from gumbeljax.speculative.law import Law, check_drafts, prepare_law
from gumbeljax.speculative.leviathan import Outcome
from gumbeljax.speculative.partition import on_shards


class Verification(NamedTuple):
    """What a block of one chain yields.

    `tokens` int32 `[*batch, draft_len + 1]`: the accepted tokens, one from the target, then -1. `num_accepted` int32
    `[*batch]`: the block has `num_accepted + 1` tokens. `log_probs` f32, shape of the tokens: under the law that the target
    draws from (after bias, mask, temperature and filters); 0 behind the last token, so that a sum is that of the block.
    Where the target has no law the last token is -1, with NaN.
    """

    tokens: Array
    num_accepted: Array
    log_probs: Array


class ChainsVerification(NamedTuple):
    """As `Verification`; `chain` int32 `[*batch]` is a chain that begins with the accepted tokens: its cache is the one to
    keep."""

    tokens: Array
    num_accepted: Array
    log_probs: Array
    chain: Array


def _run(target: Law, draft: Law | None, draft_tokens, key: Key, draft_lens, chains: bool) -> Outcome:
    p, p_config, shape = prepare_law(target, "target")
    drafts = check_drafts(draft_tokens, draft_lens, shape, chains)
    q, q_config = None, None
    if draft is not None:
        q, q_config, q_shape = prepare_law(draft, "draft")
        if q_shape != (*shape[:-1], shape[-1] - 1):
            raise ValueError(f"draft must have the positions of draft_tokens, {[*shape[:-1], shape[-1] - 1]}; got "
                             f"{list(q_shape)}: pass the law that each token was drawn from.")
        if cut.num_tokens(q_config) != cut.num_tokens(p_config):
            raise ValueError(f"draft must have as many tokens as the target, {cut.num_tokens(p_config)}; got "
                             f"{cut.num_tokens(q_config)}: cut the padding of the wider table with valid_vocab.")
        if shape[-1] == 1:  # nothing was drafted
            q, q_config = None, None
    (p, p_config), (q, q_config) = cut.agree((p, p_config), (q, q_config))
    cut.check_shared(p_config.axis_name, draft_tokens=drafts.tokens, draft_lens=drafts.lens)
    check_rows(p.h, key, None, p_config.axis_name, way_out="one key per position, sharded like h")
    positions = (*drafts.batch_shape, shape[-1])
    keys = tuple(x.reshape(-1, shape[-1]) for x in row_keys(key, positions))  # a target has at least one position
    if drafts.tokens.shape[0] == 0:
        nothing = jnp.zeros(positions, jnp.int32)
        return Outcome(nothing, nothing[..., 0], nothing.astype(jnp.float32), nothing[..., 0], nothing[..., 0] > 0)
    with plain_broadcasting():
        has_filters = p.filters is not None or (q is not None and q.filters is not None)
        verify_drafts = stored.verify_drafts if has_filters else leviathan.verify_drafts
        lens = None if draft_lens is None else drafts.lens
        out = verify_drafts(p, q, drafts.tokens, lens, keys, target_config=p_config, draft_config=q_config)
    return Outcome(*(x.reshape(*drafts.batch_shape, *x.shape[1:]) for x in out))


verify_one, verify_several = (functools.partial(_run, chains=chains) for chains in (False, True))


def verify(target: Law, draft: Law | None, draft_tokens: ArrayLike, key: Key, *,
           draft_lens: ArrayLike | None = None) -> Verification:
    """Accepts or rejects drafted tokens so that the output follows the target's law.

    Exact in distribution, for every draft that did not look at the target's noise: the tokens of a block are distributed as
    the target alone would have drawn them one by one (up to the rounding of float32 log-probabilities). Greedy targets
    (temperature 0) give the tokens of greedy decoding. `verify_coupled` is pathwise exact, and accepts a little less.

    Of tables that are cut over the vocabulary (`Law.axis_name` in `jax.shard_map`, or explicit axes) a few numbers per position
    move, and the tokens are those of one device, near-ties of coins and scores within the rounding of sums aside.

    Given as hidden states, neither law's logits are written to memory: one pass over each table, then a look at a few groups
    of tokens, and outside NVIDIA GPUs now and then a pass over both tables at one position per row. (Filters do need logits: a
    few requests' at a time.) Everything is traced, so per-row temperatures, masks and lengths do not retrace.

    Args:
      target: the `Law` at positions `[*batch, draft_len + 1]`; the last is that of the token after the draft.
      draft: the `Law` that the tokens were drawn from, `[*batch, draft_len]`. None for a draft that does not sample (n-gram
        lookup, a greedy draft): all of q is on the drafted token. A draft by argmax with its soft law passed here gives a
        wrong law, and nothing can tell.
      draft_tokens: integers `[*batch, draft_len]`; draft_len may be 0. A token outside the vocabulary, or whose draft has no
        law (both are marked -1 by `gumbeljax.sample`), ends its draft: there the target draws.
      key: one key, or keys `[*batch, draft_len + 1]`, one for each position; `position_keys` makes those of decode loops.
        One key gives position i (row-major) the key `fold_in(key, i)`, so two blocks need two keys.
      draft_lens: integers `[*batch]` or one, tokens that count in each draft; all by default.

    Returns:
      A `Verification`.

    Raises:
      ValueError, TypeError: an argument breaks its rule.
      NotImplementedError: an implementation named in a law cannot run here.

    >>> import jax, jax.numpy as jnp
    >>> target = Law(jnp.log(jnp.array([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]])))
    >>> verify(target, None, jnp.array([1, 0]), jax.random.key(0)).tokens.tolist()
    [1, 2, -1]

    Source: Y. Leviathan, M. Kalman, Y. Matias, "Fast inference from transformers via speculative decoding", ICML 2023.
    """
    out = on_shards(verify_one, target, draft, draft_tokens, key, draft_lens, inner=1)
    return Verification(*(verify_one(target, draft, draft_tokens, key, draft_lens) if out is None else out)[:3])


def verify_chains(target: Law, draft: Law, draft_tokens: ArrayLike, key: Key, *,
                  draft_lens: ArrayLike | None = None) -> ChainsVerification:
    """`verify` for several chains drafted independently from one prefix: more is accepted, and the law is still the target's.

    Exact in distribution. At the first position all N chains are rejected with probability R_N (docs/speculative.md) in place
    of R_1, the total variation distance of p and q; `chains_acceptance` says what to expect. With one chain it is `verify`,
    token for token. Each chain beyond the first costs one more pass over both tables.

    Args:
      target: the `Law` at `[*batch, chains, draft_len + 1]`.
      draft: the `Law` that all chains were drawn from, `[*batch, chains, draft_len]`. Chains with a common prefix must have
        the same law after it, so options may not differ between the chains of a request.
      draft_tokens: integers `[*batch, chains, draft_len]`, every chain drawn with noise of its own.
      key: one key, or keys `[*batch, draft_len + 1]`, as in `verify`.
      draft_lens: integers `[*batch, chains]` or one.

    Returns:
      A `ChainsVerification`, tokens `[*batch, draft_len + 1]`.

    Raises: as `verify`.

    >>> import jax, jax.numpy as jnp
    >>> p = jnp.log(jnp.array([0.0, 1.0, 0.0]))
    >>> out = verify_chains(Law(jnp.tile(p, (2, 2, 1))), Law(jnp.zeros((2, 1, 3))), jnp.array([[0], [1]]), jax.random.key(0))
    >>> out.tokens.tolist(), int(out.chain)
    ([1, 1], 1)

    Source: X. Miao et al., "SpecInfer", ASPLOS 2024.
    """
    if draft is None:
        raise TypeError("draft must be the Law that the chains were drawn from; got None: chains that are not drawn have no "
                        "common law, so use verify with one of them.")
    out = on_shards(verify_several, target, draft, draft_tokens, key, draft_lens, inner=2)
    return ChainsVerification(*(verify_several(target, draft, draft_tokens, key, draft_lens) if out is None else out)[:4])


def verify_coupled(target: Law, draft_tokens: ArrayLike, key: Key, *, draft_lens: ArrayLike | None = None) -> Verification:
    """Accepts drafted tokens as long as they are the tokens that `gumbeljax.sample` draws from the target.

    Pathwise exact: the tokens are those of plain decoding with the same keys, so no draft, and no choice of drafts, can
    change one of them (near-ties within the rounding of `h @ w.T` aside). Draft laws are not needed, only their tokens.

    It pays when the draft draws with the same noise: `sample(draft_h, draft_w, keys[..., j])`, where `keys` are those given
    here, makes both choose the same token with probability `coupled_acceptance`. Grouped noise can do a little better or
    worse than noise per token, whose acceptance is at least (1 - TV) / (1 + TV) for laws at total variation TV; `verify`
    accepts 1 - TV.

    Args:
      target: the `Law` at positions `[*batch, draft_len + 1]`.
      draft_tokens, draft_lens: as in `verify`.
      key: as in `verify`: the keys of `gumbeljax.sample` for the target's hidden states.

    Returns:
      A `Verification`.

    Raises: as `verify`.

    >>> import jax, jax.numpy as jnp, gumbeljax
    >>> logits = jax.random.normal(jax.random.key(1), (4, 32))
    >>> drawn = gumbeljax.sample_logits(logits, jax.random.key(0))
    >>> bool((verify_coupled(Law(logits), drawn[:3], jax.random.key(0)).tokens == drawn).all())
    True

    Source: M. Daliri, C. Musco, A. T. Suresh, "Coupling without communication and drafter-invariant speculative decoding",
    arXiv 2408.07978.
    """
    out = on_shards(_run_coupled, target, None, draft_tokens, key, draft_lens, inner=1)
    return _run_coupled(target, None, draft_tokens, key, draft_lens) if out is None else out


def _run_coupled(target: Law, _, draft_tokens, key: Key, draft_lens) -> Verification:
    operands, config, shape = prepare_law(target, "target")
    drafts = check_drafts(draft_tokens, draft_lens, shape, chains=False)
    cut.check_shared(config.axis_name, draft_tokens=drafts.tokens, draft_lens=drafts.lens)
    check_rows(operands.h, key, None, config.axis_name, way_out="one key per position, sharded like h")
    keys = row_keys(key, shape)
    if operands.h.shape[0] == 0:
        nothing = jnp.zeros(shape, jnp.int32)
        return Verification(nothing, nothing[..., 0], nothing.astype(jnp.float32))
    with plain_broadcasting():
        verify_drafts = coupled.verify_drafts if operands.filters is None else stored.verify_coupled_drafts
        out = verify_drafts(operands, drafts.tokens[:, 0], drafts.lens[:, 0], keys, config=config)
    return Verification(*(x.reshape(*drafts.batch_shape, *x.shape[1:]) for x in out))
