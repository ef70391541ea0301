"""The two halves of lossless verification: what the tables say about the drafts, and the walk along them.

Shapes: `requests` is the flattened batch; drafts are `[requests, chains, draft_len]`; positions are draft_len + 1.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gumbeljax import _shards
from gumbeljax._call import Config, Operands
from gumbeljax._implementation import Stages
from gumbeljax._typing import Array
from gumbeljax.speculative import cut
from pallas_kernels import dual, noise, race, search, xla
from pallas_kernels.logits import Elementwise

STREAMS = 2**23  # of one purpose: sample number STREAMS is the first of the next purpose
FROM_TARGET = noise.RESIDUAL * STREAMS  # the bonus, or what replaces a rejected token: a position has one or the other


class Outcome(NamedTuple):
    """Of a block: tokens and their log p `[requests, positions]`, accepted tokens and a chain that has them `[requests]`."""

    tokens: Array
    num_accepted: Array
    log_probs: Array
    chain: Array
    undecided: Array  # bool `[requests]`: a pass over both tables had to find the token


class Scores(NamedTuple):
    """Of the drafted tokens, `[requests, chains, draft_len]`; C_m and R_m have an axis of levels in front."""

    proposed: Array  # whether there is a token to try
    log_p: Array
    log_q: Array
    factors: Array  # C_m, m = 0 .. chains
    masses: Array  # R_m, m = 0 .. chains - 1


class Stop(NamedTuple):
    """Where the walk ended, `[requests]` each: after `position` accepted tokens of `chain`, `level` chains rejected there."""

    position: Array
    chain: Array
    level: Array


def stages_of_both(target_config: Config, draft_config: Config | None) -> Stages:
    """Whose passes over both tables run: the plain ones if either law asks for them, as laws given as logits do."""
    if draft_config is not None and draft_config.implementation == "xla":
        return draft_config.stages()
    return target_config.stages()


def _side(operands: Operands, config: Config, normalizer: Any) -> dual.Side:
    return dual.Side(operands.h, operands.w, operands.t, operands.options(config), normalizer, config.vocab_axis,
                     config.precision)


def target_side(operands: Operands, config: Config, keys) -> tuple[dual.Side, race.Scores]:
    """One pass over the target's table: p's normaliser and a token drawn from p (-1 without a law), at every row, and what the
    groups scored in that draw."""
    drawn, scores = cut.scored_draw(operands, config, keys, sample=FROM_TARGET)
    normalizer = dual.Normalizer(drawn.log_normalizer, None, drawn.token, drawn.processed_log_prob)
    return _side(operands, config, normalizer), scores


def draft_side(operands: Operands | None, config: Config | None, tokens: Array) -> dual.Side:
    """One pass over the draft's table: q's normaliser. Without operands q is all on the token."""
    if operands is None or config is None:
        return dual.Side(None, None, None, Elementwise(), dual.Normalizer(None, None, tokens, None))
    mass = _shards.mass(operands, config)
    return _side(operands, config, dual.Normalizer(mass.top, mass.total, mass.argmax, None))


def levels(target: dual.Side, draft: dual.Side, num_chains: int, config: Config, stages: Stages) -> tuple[Array, Array]:
    """(C_m for m = 0 .. N, R_m for m = 0 .. N - 1), `[levels, rows]`: N - 1 passes over both tables."""
    zero = jnp.zeros(target.t.shape, jnp.float32)
    factors, masses = [zero, zero + 1.0], [zero + 1.0]
    for _ in range(num_chains - 1):
        masses.append(cut.residual_mass(target, draft, factors[-1], config, stages))
        factors.append(factors[-1] + masses[-1])
    return jnp.stack(factors), jnp.stack(masses)


def log_coins(keys, num_chains: int) -> Array:
    """One for each chain and position, `[chains, requests, positions]`."""
    return noise.log_coin(keys[0], keys[1], jnp.arange(num_chains)[:, None, None])


def _at_level(x: Array, level: Array) -> Array:
    """x `[levels, requests]` at each request's level."""
    return jnp.take_along_axis(x, level[None], axis=0)[0]


def walk_one(scores: Scores, coins: Array) -> Stop:
    """`walk` for one chain, all positions at once."""
    proposed = scores.proposed[:, 0]  # true, and then false
    ratio = scores.log_p[:, 0] - scores.log_q[:, 0]  # NaN where p and q are 0: not accepted
    accepted = proposed & (coins[0, :, :proposed.shape[1]] < ratio)
    position = jnp.sum(jnp.cumprod(accepted, axis=-1, dtype=jnp.int32), axis=-1, dtype=jnp.int32)
    tried = position < jnp.sum(proposed, axis=-1, dtype=jnp.int32)
    return Stop(position, jnp.zeros_like(position), tried.astype(jnp.int32))


def walk(tokens: Array, scores: Scores, coins: Array) -> Stop:
    """Tries the drafted tokens, position by position and chain by chain; coins are those of `log_coins`.

    At each position the chains that agree with what was kept are tried in turn; the first that is accepted decides who
    goes on. Chains before it had another token, or the same one rejected, which leaves it no mass to be accepted later.
    """
    requests, num_chains, draft_len = tokens.shape
    alive = jnp.ones((requests, num_chains), bool)
    going = jnp.ones(requests, bool)
    stop = Stop(*(jnp.zeros(requests, jnp.int32) for _ in Stop._fields))
    for j in range(draft_len):
        first_alive = jnp.argmax(alive, axis=-1).astype(jnp.int32)
        level, taken = jnp.zeros(requests, jnp.int32), jnp.full(requests, num_chains, jnp.int32)
        for n in range(num_chains):
            tried = alive[:, n] & scores.proposed[:, n, j] & (taken == num_chains)
            factor, mass = (_at_level(x[:, :, n, j], level) for x in (scores.factors, scores.masses))
            left = dual.log_residual(scores.log_p[:, n, j], scores.log_q[:, n, j], factor)
            ratio = left - jnp.log(mass) - scores.log_q[:, n, j]  # NaN where p and q are 0: not accepted
            accepted = tried & (mass > search.NEGLIGIBLE) & (coins[n, :, j] < ratio)
            taken = jnp.where(accepted, n, taken)
            level = level + (tried & ~accepted)
        onward = going & (taken < num_chains)
        ends = going & ~onward
        stop = Stop(*(jnp.where(ends, new, old) for new, old in zip((j, first_alive, level), stop, strict=True)))
        taken_token = jnp.take_along_axis(tokens[:, :, j], jnp.minimum(taken, num_chains - 1)[:, None], axis=1)
        same = (tokens[:, :, j] == taken_token) & (jnp.arange(num_chains) >= taken[:, None])
        alive, going = jnp.where(onward[:, None], alive & same, alive), onward
    whole = (jnp.int32(draft_len), jnp.argmax(alive, axis=-1).astype(jnp.int32), jnp.int32(0))
    return Stop(*(jnp.where(going, new, old) for new, old in zip(whole, stop, strict=True)))


def _score(target: dual.Side, q: dual.Side, tokens: Array, lens: Array | None, rows: Array, config: Config,
           stages: Stages) -> Scores:
    """Log-probabilities of the drafted tokens under both laws: the draft's side has the rows of `tokens`, flattened, the
    target's those of `rows [requests, chains, positions]`, which also has the position behind each draft."""
    shape = tokens.shape
    if shape[1] == 1:
        one = jnp.ones((1, tokens.size), jnp.float32)
        factors, masses = jnp.concatenate([0 * one, one]), one
    else:
        factors, masses = levels(dual.at_rows(target, rows[..., :-1].reshape(-1)), q, shape[1], config, stages)
    # The target is asked at all positions, so that no part of its hidden states is copied.
    everywhere = jnp.pad(tokens, ((0, 0), (0, 0), (0, 1)))
    log_p, log_q = cut.log_laws_at([target, q], [everywhere.reshape(-1), tokens.reshape(-1)], config)
    log_p, log_q = log_p.reshape(rows.shape)[..., :-1], log_q.reshape(shape)
    # A draft ends before the first token that does not exist or has no law: there the target draws freely.
    has_target, has_draft = dual.is_law(target.normalizer).reshape(rows.shape)[..., :-1], dual.is_law(q.normalizer)
    real = (tokens >= 0) & (tokens < cut.num_tokens(config)) & has_draft.reshape(shape) & has_target
    if lens is not None:
        real &= jnp.arange(shape[-1]) < lens[..., None]
    proposed = jnp.cumprod(real, axis=-1, dtype=jnp.int32) > 0
    return Scores(proposed, log_p, log_q, factors.reshape(-1, *shape), masses.reshape(-1, *shape))


def _verify_chain(target: Operands, draft: Operands | None, tokens, lens, keys, config: Config,
                  draft_config: Config | None) -> Outcome:
    """`verify_drafts` of one chain, `tokens [requests, draft_len]`, by the kernel that does all behind the passes."""
    stages, mass_pieces = config.stages(), None
    assert stages.verify_chain is not None and stages.race_pieces is not None
    p, q = _side(target, config, None), draft_side(None, None, tokens.reshape(-1))
    if draft is not None and draft_config is not None:
        q = _side(draft, draft_config, None)
        mass_pieces = draft_config.stages().mass_pieces
        assert mass_pieces is not None
        mass_pieces = functools.partial(mass_pieces, **draft_config.shape_arguments())
    tokens, log_probs, position = stages.verify_chain(
        p, q, keys, tokens, lens, sample=FROM_TARGET, vocab=config.vocab, mass_pieces=mass_pieces,
        race_pieces=functools.partial(stages.race_pieces, **config.shape_arguments()))
    none = jnp.zeros_like(position)
    return Outcome(tokens, position, log_probs, none, none > 0)


@functools.partial(jax.jit, static_argnames=("target_config", "draft_config"))
def verify_drafts(target: Operands, draft: Operands | None, tokens, lens, keys, *, target_config: Config,
                  draft_config: Config | None) -> Outcome:
    """Verifies `tokens [requests, chains, draft_len]`, of which the first `lens [requests, chains]` count, or all; keys are two
    words `[requests, positions]`."""
    requests, num_chains, draft_len = tokens.shape
    positions, config = draft_len + 1, target_config
    spread = lambda x: jnp.broadcast_to(x[:, None], (requests, num_chains, positions)).reshape(-1)  # noqa: E731
    of_rows = tuple(map(spread, keys))
    if draft_len == 0:
        drawn = cut.draw(target, config, of_rows, sample=FROM_TARGET)
        token, log_p = (x.reshape(requests, num_chains) for x in (drawn.token, drawn.processed_log_prob))
        none = jnp.zeros(requests, jnp.int32)
        return Outcome(token[:, :1], none, log_p[:, :1], none, none > 0)
    stages = stages_of_both(target_config, draft_config)
    if stages.verify_chain is not None and num_chains == 1 and not config.axis_name:
        return _verify_chain(target, draft, tokens[:, 0], None if lens is None else lens[:, 0], of_rows, target_config,
                             draft_config)
    p, group_scores = target_side(target, config, of_rows)
    rows = jnp.arange(requests * num_chains * positions).reshape(requests, num_chains, positions)
    if draft is not None:  # one table after the other: together they would need the memory of two blocks
        draft, normalizer = xla.keep_order((draft, p.normalizer))
        p = p._replace(normalizer=normalizer)
    q = draft_side(draft, draft_config, tokens.reshape(-1))
    scores = _score(p, q, tokens, lens, rows, config, stages)
    coins = log_coins(keys, num_chains)
    stop = walk_one(scores, coins) if num_chains == 1 else walk(tokens, scores, coins)

    # The last token: from p where nothing was rejected, else from what the rejections left of p.
    request, place = jnp.arange(requests, dtype=jnp.int32), jnp.minimum(stop.position, draft_len - 1)
    p_row = (request * num_chains + stop.chain) * positions + stop.position
    q_row = (request * num_chains + stop.chain) * draft_len + place
    token, log_p = p.normalizer.token[p_row], p.normalizer.token_log_prob[p_row]
    # Greedy rows have one token to be drawn, whatever q says of it.
    again = (stop.level > 0) & (p.t[p_row] != 0.0) & (token >= 0)
    factor = jnp.where(again, _at_level(scores.factors[:, request, stop.chain, place], stop.level), 0.0)
    asked = search.Asked(p_row, q_row, factor)
    found = cut.residual_search(group_scores, p, q, of_rows, asked, config, stages, sample=FROM_TARGET)
    undecided = again & ~found.is_whole()

    def draw(_):
        sides, own = (dual.at_rows(p, p_row), dual.at_rows(q, q_row)), tuple(x[p_row] for x in of_rows)
        drawn = cut.residual_draw(*sides, factor, own, config, stages, sample=FROM_TARGET)
        return tuple(jnp.where(undecided, x, y) for x, y in zip(drawn, searched, strict=True))

    other, log_p_other, mass = searched = found.token, found.log_p, found.mass
    if found.bound is not None:  # else all of them are decided
        other, log_p_other, mass = jax.lax.cond(jnp.any(undecided), draw, lambda _: searched, None)
    again &= mass > search.NEGLIGIBLE
    token, log_p = jnp.where(again, other, token), jnp.where(again, log_p_other, log_p)

    accepted = jnp.pad(tokens[request, stop.chain], ((0, 0), (0, 1)))
    log_p_accepted = jnp.pad(scores.log_p[request, stop.chain], ((0, 0), (0, 1)))
    place, last = jnp.arange(positions), stop.position[:, None]
    tokens = jnp.where(place < last, accepted, jnp.where(place == last, token[:, None], -1))
    log_probs = jnp.where(place < last, log_p_accepted, jnp.where(place == last, log_p[:, None], 0.0))
    return Outcome(tokens, stop.position, log_probs, stop.chain, undecided)
