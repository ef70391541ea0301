"""Deliberately wrong filters and processors: each must fail the gate that the library passes.

The laws are written once more here from parts that can be replaced, so that what fails is the one part that is wrong.
"""

import itertools

import numpy as np
import pytest

import gumbeljax
from gumbeljax import Processors, count_tokens
from tests import filter_oracle as oracle
from tests import heads, knobs, oracles, statistics
from tests.filter_oracle import Options
from tests.knobs import ROWS

VOCAB = 83


# Filters


def probabilities(x, t):
    weights = oracle.weights_of(x, t)
    return weights / weights.sum()


def prefix(x, weights, base, p, before=True):
    """Tokens in order while the mass before them is below p (or, wrongly, while the mass with them is at most p)."""
    order = oracle.descending(x)
    mass = np.cumsum(weights[order]) / base
    inside = np.zeros(len(x), bool)
    inside[order] = (mass - weights[order] / base < p - 1e-9) if before else mass <= p
    return inside | (p >= 1)


def first(x, k, ids=None):
    inside = np.zeros(len(x), bool)
    ids = np.arange(len(x)) if ids is None else ids
    inside[np.lexsort((ids, -x))[: k if k > 0 else len(x)]] = True
    return inside


def of_parts(top_k=first, top_p=prefix, renormalise=True, min_p=lambda w, m: w >= m * w.max(), p_first=False, min_p_t=None):
    """A filter from replaceable parts; as they stand they are right."""

    def kept(x, t, k, p, m):
        weights = oracle.weights_of(x, t)
        if p_first:
            out = top_p(x, weights, weights.sum(), p)
            out &= top_k(np.where(out, x, -np.inf), k)
        else:
            out = top_k(x, k)
            out &= top_p(x, np.where(out, weights, 0), weights[out].sum() if renormalise else weights.sum(), p)
        return out & (min_p(oracle.weights_of(x, t if min_p_t is None else min_p_t), m) if m > 0 else True)

    return kept


WRONG_FILTERS = {
    "top_p before top_k": of_parts(p_first=True),
    "not renormalised after top_k": of_parts(renormalise=False),
    "the crossing token dropped": of_parts(top_p=lambda x, w, b, p: prefix(x, w, b, p, before=False) | (x == x.max())),
    "ties kept together": of_parts(top_k=lambda x, k: x >= np.sort(x)[::-1][min(k, len(x)) - 1] if k > 0 else x == x),
    "highest id first among equals": of_parts(top_k=lambda x, k: first(x, k, -np.arange(len(x)))),
    "the sign of zero read": of_parts(top_k=lambda x, k: first(np.where((x == 0) & np.signbit(x), -1e-6, x), k)),
    "min_p before temperature": of_parts(min_p_t=1.0),
    "min_p of the largest logit": of_parts(min_p=lambda w, m: np.log(w) >= m * np.log(w).max() - 1.0),
    "min_p absolute": of_parts(min_p=lambda w, m: w / w.sum() >= m),
    "top_k off is top_k 1": of_parts(top_k=lambda x, k: first(x, max(k, 1))),
    "top_k misses one": of_parts(top_k=lambda x, k: first(x, max(k - 1, 1) if k > 0 else 0)),
    "temperature left out": lambda x, t, k, p, m: of_parts()(x, 1.0, k, p, m),
}


def gate_cases():
    """Rows on which the parts differ."""
    rng = np.random.default_rng(5)
    for kind in ("grid", "both zeros", "normal", "flat"):
        x = knobs.row_of(kind, 40, rng)[None]
        for k, p, m in itertools.product((0, 3, 7), (0.5, 0.8, 1.0), (0.0, 0.03)):
            yield x, Options(2.0, k, p, m)


def passes(kept_of):
    try:
        for x, o in gate_cases():
            kept = kept_of(x[0], o)
            knobs.assert_kept(kept[None], x.astype(np.float64), o)
    except AssertionError:
        return False
    return True


def test_the_gate_of_filters_passes_the_library_and_its_parts():
    def ours(x, o):
        h, w = heads.pinned_head(x)
        return np.asarray(gumbeljax.kept_tokens(h, w, **{n: v[:1] for n, v in knobs.filters_of(o).items()}))[0]

    assert passes(ours)
    assert passes(lambda x, o: of_parts()(x.astype(np.float64), o.temperature, o.top_k, o.top_p, o.min_p))


@pytest.mark.parametrize("wrong", WRONG_FILTERS)
def test_wrong_filters_fail_the_gate(wrong):
    with np.errstate(divide="ignore"):
        assert not passes(lambda x, o: WRONG_FILTERS[wrong](x.astype(np.float64), o.temperature, o.top_k, o.top_p, o.min_p))


def test_a_draw_whose_groups_race_with_tokens_that_were_filtered_out_fails():
    """Groups weighed before the filters: the law is wrong, and so are tokens."""
    rng = np.random.default_rng(1)
    rows, x = 4000, np.round(rng.normal(size=64) * 8) / 8
    kept = oracle.kept_set(x, 1.0, 8, 1.0, 0.0)[0]
    words = heads.keys_of(0, rows)[1]
    allowed = np.broadcast_to(np.where(kept, x, -np.inf), (rows, 64))
    h, w = heads.pinned_head(x, rows=rows)
    tokens = np.asarray(gumbeljax.sample(h, w, heads.keys_of(0, rows)[0], top_k=8))
    heads.assert_pathwise(tokens, allowed, words)
    probs = np.exp(oracles.log_softmax(allowed[:1]))[0]
    assert statistics.chi_square(np.bincount(tokens, minlength=64), probs) > statistics.ALPHA
    groups = oracles.grouped_tokens(np.broadcast_to(x, (rows, 64)), words) // 16  # the race of all tokens
    inside = np.where(np.arange(64)[None] // 16 == groups[:, None], allowed, -np.inf)
    wrong = oracles.grouped_tokens(inside, words)
    assert (wrong == -1).any() or statistics.chi_square(np.bincount(wrong, minlength=64), probs) < statistics.ALPHA
    with pytest.raises(AssertionError):
        heads.assert_pathwise(wrong, allowed, words)


# Processors


def penalised(
    order=("bias", "repetition", "presence", "mask"),
    repeat=lambda x, r, n: x / r if x > 0 else x * r,
    presence=lambda x, a, n: x - a,
    frequency=lambda x, a, n: x - a * n,
    seen_by="both",
    counted="output",
):
    """Processors from replaceable parts on one row; as they stand they are right."""

    def of(x, o, i):
        prompt, output = o.prompt[i], o.output[i]
        seen = {"both": [*prompt, *output], "output": output, "prompt": prompt}[seen_by]
        listed = output if counted == "output" else [*prompt, *output]
        x = x.astype(np.float64).copy()
        with np.errstate(invalid="ignore"):
            for step in order:
                if step == "bias":
                    x += o.logit_bias[i]
                elif step == "repetition":
                    for v in set(seen):
                        x[v] = repeat(x[v], o.repetition, seen.count(v))
                elif step == "presence":
                    for v in set(listed):
                        x[v] = frequency(presence(x[v], o.presence, listed.count(v)), o.frequency, listed.count(v))
                else:
                    x = np.where(o.mask[i], x, -np.inf)
        return x

    return of


WRONG_PROCESSORS = {
    "penalty with the wrong sign": penalised(presence=lambda x, a, n: x + a),
    "frequency with the wrong sign": penalised(frequency=lambda x, a, n: x + a * n),
    "negative logits divided too": penalised(repeat=lambda x, r, n: x / r),
    "repetition per occurrence": penalised(repeat=lambda x, r, n: x / r**n if x > 0 else x * r**n),
    "frequency once per id": penalised(frequency=lambda x, a, n: x - a),
    "presence per occurrence": penalised(presence=lambda x, a, n: x - a * n),
    "repetition of the output alone": penalised(seen_by="output"),
    "repetition of the prompt alone": penalised(seen_by="prompt"),
    "presence counts the prompt": penalised(counted="both"),
    "penalties before the bias": penalised(order=("repetition", "presence", "bias", "mask")),
    "presence before repetition": penalised(order=("bias", "presence", "repetition", "mask")),
    "a masked token comes back": penalised(
        order=("mask", "bias", "repetition", "presence"), repeat=lambda x, r, n: max(x, -50) * r
    ),
}


def assert_processed(processed):
    """Log-probs of `processed(logits, options, row)` against the oracle's laws."""
    for seed in range(3):
        rng = np.random.default_rng(seed)
        logits = np.round(rng.normal(size=(ROWS, VOCAB)) * 16).astype(np.float32) / 8
        o = Options(
            logit_bias=rng.integers(-8, 9, (ROWS, VOCAB)).astype(np.float32) / 8,
            repetition=2.0,
            presence=0.5,
            frequency=0.25,
            mask=rng.random((ROWS, VOCAB)) < 0.8,
            prompt=[[1, 1, 3]] * ROWS,
            output=[[3, 3, 7, 7, 7, 40]] * ROWS,
        )
        o.mask[:, [1, 3, 7]] = True
        o.mask[:, 40] = False
        got = processed(logits, o)
        knobs.assert_log_probs(oracles.log_softmax(got) if got.dtype == np.float64 else got, oracle.laws(logits, o).tempered)


def test_the_gate_of_processors_passes_the_library_and_its_parts():
    def ours(logits, o):
        processors = Processors(
            repetition_penalty=o.repetition,
            presence_penalty=o.presence,
            frequency_penalty=o.frequency,
            counts=count_tokens(knobs.padded(o.prompt), VOCAB).add(knobs.padded(o.output)),
        )
        h, w = knobs.logits_head(logits)
        return np.asarray(gumbeljax.processed_log_probs(h, w, logit_bias=o.logit_bias, mask=o.mask, processors=processors))

    assert_processed(ours)
    assert_processed(lambda logits, o: np.stack([penalised()(x, o, i) for i, x in enumerate(logits)]))


@pytest.mark.parametrize("wrong", WRONG_PROCESSORS)
def test_wrong_processors_fail_the_gate(wrong):
    with pytest.raises(AssertionError):
        assert_processed(lambda logits, o: np.stack([WRONG_PROCESSORS[wrong](x, o, i) for i, x in enumerate(logits)]))
