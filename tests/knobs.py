"""Cases for every knob of a draw, the same knobs as arguments of gumbeljax, and the gates that answers must pass.

A case is logits `[rows, vocab]` and `filter_oracle.Options`. `arguments` turns the options into arrays that are all there,
neutral where an option is off, so that one compiled function serves every combination.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

import gumbeljax
from tests import filter_oracle as oracle
from tests import heads
from tests.filter_oracle import Options

ROWS, LISTED = 4, 6  # rows of a case, places of a token list

checked = functools.partial(settings, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))


class Case(NamedTuple):
    logits: np.ndarray
    options: Options
    seed: int = 0


class Answers(NamedTuple):
    """What gumbeljax says about a case."""

    draw: gumbeljax.Draw
    kept: np.ndarray
    log_probs: np.ndarray
    top: gumbeljax.TopLogProbs
    score: np.ndarray
    distinct: np.ndarray


def logits_head(logits):
    """(h, w) with h the identity: any finite logits `[rows, vocab]`, exactly."""
    logits = jnp.asarray(logits, jnp.float32)
    return jnp.eye(logits.shape[0], dtype=jnp.float32), logits.T


# From the oracle's options to ours


def padded(lists, size=LISTED):
    """Token lists of the rows as int32 `[rows, size]`, filled up with -1."""
    return np.array([[*tokens, *[-1] * (size - len(tokens))] for tokens in lists], np.int32).reshape(len(lists), size)


def filters_of(options: Options, rows=ROWS):
    """The filters and the temperature, per row."""
    given = {"temperature": np.float32, "top_k": np.int32, "top_p": np.float32, "min_p": np.float32}
    return {name: jnp.asarray(np.broadcast_to(getattr(options, name), (rows,)).astype(kind)) for name, kind in given.items()}


def processors_of(options: Options, vocab: int, rows=ROWS, counts=None) -> gumbeljax.Processors:
    """The processors, each of them there."""
    o, none = options, [[]] * rows
    per_row = lambda x: jnp.asarray(np.broadcast_to(x, (rows,)), jnp.float32)  # noqa: E731
    if counts is None:
        counts = gumbeljax.count_tokens(padded(o.prompt or none), vocab).add(padded(o.output or none))
    sparse = o.sparse_bias or none
    return gumbeljax.Processors(
        bias_tokens=padded([[t for t, _ in row] for row in sparse]),
        bias_values=np.array([[*(v for _, v in row), *[0.0] * (LISTED - len(row))] for row in sparse], np.float32),
        repetition_penalty=per_row(o.repetition),
        presence_penalty=per_row(o.presence),
        frequency_penalty=per_row(o.frequency),
        counts=counts,
        allowed_tokens=padded(o.allowed or [range(vocab)] * rows, vocab),
        banned_tokens=padded(o.banned or none),
        end_tokens=padded(o.end_tokens or none),
        min_new_tokens=np.broadcast_to(o.min_new, (rows,)).astype(np.int32),
    )


@functools.partial(jax.jit, static_argnames=("static", "num"))
def answers(logits, keys, arguments, static=(), num=5) -> Answers:
    """Every public function, once, in one compiled function."""
    h, w = logits_head(logits)
    options = arguments | dict(static)
    out = gumbeljax.sample_with_log_probs(h, w, keys, **options)
    return Answers(
        out,
        gumbeljax.kept_tokens(h, w, **options),
        gumbeljax.processed_log_probs(h, w, **options),
        gumbeljax.top_log_probs(h, w, min(num, w.shape[0]), tokens=out.token, **options),
        gumbeljax.log_prob(h, w, out.token, **options),
        gumbeljax.sample(h, w, keys, num_samples=min(num, w.shape[0]), replace=False, **options),
    )


# Gates


def assert_kept(kept, x, options: Options):
    """The kept set: the oracle's outside the band, and in any case a prefix of the order without what is masked."""
    rows = len(x)
    t = oracle.per_row(oracle.f32(options.temperature), rows)
    k, p, m = (oracle.per_row(v, rows) for v in (options.top_k, oracle.f32(options.top_p), oracle.f32(options.min_p)))
    for i, row in enumerate(zip(x, t, k, p, m, strict=True)):
        want, near = oracle.kept_set(*row)
        wrong = np.flatnonzero((kept[i] != want) & ~near)
        assert wrong.size == 0, f"row {i}: {kept[i, wrong][:9]} at ids {wrong[:9]}, T, k, p, m = {row[1:]}"
        in_order = kept[i][oracle.descending(np.where(np.isnan(x[i]), -np.inf, x[i]))]
        assert not np.any(in_order[1:] & ~in_order[:-1]), f"row {i}: not a prefix"


def assert_log_probs(got, want, tolerance=2e-5):
    """-inf and NaN in the same places, else to float32 rounding."""
    got, want = np.asarray(got, np.float64), np.asarray(want)
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(want))
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


def assert_answers(case: Case, got: Answers, words):
    """Everything about a case whose processed logits are exact in float32."""
    rows = len(case.logits)
    want = oracle.laws(case.logits, case.options)
    t, i = oracle.per_row(oracle.f32(case.options.temperature), rows), np.arange(rows)
    kept, token = np.asarray(got.kept), np.asarray(got.draw.token)
    assert_kept(kept, want.logits, case.options)
    lawless = np.isnan(want.tempered).any(1)
    in_set = np.where(kept | lawless[:, None], want.logits, -np.inf)
    processed = oracle.oracles.log_softmax(in_set, t)  # of our own kept set, which may differ inside the band
    assert_log_probs(got.log_probs, processed)
    heads.assert_pathwise(token, in_set, words, t)
    np.testing.assert_array_equal(token == -1, lawless)
    here = lambda law: np.where(lawless, np.nan, law[i, token])  # noqa: E731
    for name, law in (("model_log_prob", want.model), ("tempered_log_prob", want.tempered), ("processed_log_prob", processed)):
        assert_log_probs(getattr(got.draw, name), here(law), 5e-5)
    assert_log_probs(got.score, here(processed), 5e-5)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        top, safe = want.logits.max(-1), np.where(t < oracle.oracles.SMALLEST_TEMPERATURE, 1.0, t)
        normalizer = np.where(safe == t, top + t * np.log(np.exp((want.logits - top[:, None]) / safe[:, None]).sum(-1)), top)
    np.testing.assert_allclose(got.draw.log_normalizer, np.where(lawless, np.nan, normalizer), rtol=2e-5, atol=2e-5)
    assert_top(got.top, got.log_probs, in_set, token)
    distinct = np.asarray(got.distinct)
    np.testing.assert_array_equal(distinct[:, 0], token)
    for row, inside in zip(distinct, kept & ~lawless[:, None], strict=True):
        real = row[row >= 0]
        assert len(set(real.tolist())) == len(real) == min(len(row), inside.sum()) and inside[real].all()


def assert_top(top, log_probs, logits, token):
    """The best tokens are in the order of their logits (log-probs may tie where logits do not); the rank is a count."""
    log_probs = np.asarray(log_probs)
    tokens, values = oracle.best_tokens(log_probs, top.tokens.shape[1])
    np.testing.assert_array_equal(top.tokens, tokens)
    np.testing.assert_array_equal(top.log_probs, values.astype(np.float32))
    np.testing.assert_array_equal(top.rank, oracle.rank(log_probs, log_probs, token))


# Strategies


KINDS = ("grid", "flat", "both zeros", "normal", "peaked", "far apart", "two values")
TEMPERATURES = st.one_of(st.sampled_from([0.0, 0.5, 1.0, 2.0, 1e-3, 100.0, 1e-30]), st.floats(0.125, 4.0, width=32))
MASSES = st.one_of(
    st.sampled_from([0.0, 1e-12, 1e-8, 1e-3, 0.5, 0.9, 1 - 1e-6, 1 - 2.0**-24, 1.0]),
    st.floats(0.0, 1.0, width=32, allow_subnormal=False),
)
SHARES = st.one_of(st.sampled_from([0.0, 1e-30, 1e-8, 0.05, 0.5, 1.0]), st.floats(0.0, 1.0, width=32, allow_subnormal=False))


def row_of(kind, vocab, rng, exact=True):
    """One row of finite float32 logits."""
    x = {
        "grid": lambda: rng.integers(-16, 17, vocab) / 4,
        "flat": lambda: np.full(vocab, 1.5),
        "both zeros": lambda: np.where(rng.random(vocab) < 0.5, 0.0, -0.0),
        "normal": lambda: rng.normal(size=vocab) * 2,
        "peaked": lambda: np.where(rng.random(vocab) < 0.1, 8.0, -8.0),
        "far apart": lambda: rng.permutation(vocab) * 64.0,
        "two values": lambda: rng.integers(0, 2, vocab) * 1.0,
    }[kind]()
    return (np.round(x * 8) / 8 if exact and kind == "normal" else x).astype(np.float32)


def counts_for(vocab):
    """Values of top_k around everything that matters to a vocabulary."""
    values = {-1, 0, 1, 2, 3, 5, 16, 17, vocab // 2, vocab - 1, vocab, vocab + 1, 2**30, 2**31 - 1}
    return st.sampled_from(sorted(values))


@st.composite
def filter_cases(draw, vocabs, kinds=KINDS, rows=ROWS):
    """Random rows, each with its own temperature and filters."""
    vocab, seed = draw(st.sampled_from(vocabs)), draw(st.integers(0, 2**31 - 1))
    rng = np.random.default_rng(seed)
    several = lambda s: np.array(draw(st.lists(s, min_size=rows, max_size=rows)))  # noqa: E731
    logits = np.stack([row_of(draw(st.sampled_from(kinds)), vocab, rng, exact=False) for _ in range(rows)])
    return Case(logits, Options(several(TEMPERATURES), several(counts_for(vocab)), several(MASSES), several(SHARES)), seed)


@st.composite
def processor_cases(draw, vocab, exact=True, rows=ROWS):
    """Every processor, on by chance, with filters by chance; `exact`: float32 and float64 logits are the same numbers."""
    case = draw(filter_cases([vocab], rows=rows))
    rng = np.random.default_rng(case.seed)
    on = lambda: draw(st.booleans())  # noqa: E731
    tokens = lambda n: rng.integers(0, vocab, rng.integers(0, n + 1)).tolist()  # noqa: E731
    lists = lambda n=LISTED: [tokens(n) for _ in range(rows)]  # noqa: E731
    eighths = lambda *shape: (rng.integers(-16, 17, shape) / 8).astype(np.float32)  # noqa: E731
    number = lambda *choices: rng.choice(choices, rows) if exact else rng.uniform(min(choices), max(choices), rows)  # noqa: E731
    padded_head = on() and vocab > 40  # together with scale: each pair of static options is a compilation
    values = {
        "scale": 0.5 if padded_head else None,
        "valid_vocab": vocab - 3 if padded_head else None,
        "sparse_bias": [[(t, float(eighths())) for t in row] for row in lists()] if on() else None,
        "logit_bias": eighths(rows, vocab) if on() else None,
        "mask": rng.random((rows, vocab)) < draw(st.sampled_from([0.05, 0.5, 0.95])) if on() else None,
        "banned": lists() if on() else None,
        "end_tokens": lists(2) if on() else None,
        "min_new": rng.integers(0, 5, rows),
        "allowed": lists(vocab) if on() else None,
        "prompt": lists(),
        "output": [t + t[:1] * 2 for t in lists(LISTED - 2)],
    }
    if on():
        values |= {
            "repetition": number(0.5, 1, 2, 4),
            "presence": number(-0.5, 0, 0.5, 1.25),
            "frequency": number(-0.25, 0, 0.5),
        }
    if (real := values["valid_vocab"]) is not None:
        keep = lambda rows: rows and [[t for t in row if (t if isinstance(t, int) else t[0]) < real] for row in rows]  # noqa: E731
        values |= {name: keep(values[name]) for name in ("sparse_bias", "banned", "end_tokens", "allowed")}
    logits = case.logits if not exact else np.round(case.logits * 8) / 8
    return Case(logits.astype(np.float32), case.options._replace(**values), case.seed)
