"""Penalties, biases and everything that forbids a token, alone and together with filters, against lists and loops."""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

import gumbeljax
from gumbeljax import Processors, count_tokens, options_from_config
from tests import filter_oracle as oracle
from tests import heads, knobs, oracles
from tests.filter_oracle import Options
from tests.knobs import ROWS

VOCAB = 83


def ask(case, vocab):
    """(answers, words) of a case with every option there, neutral where it is off."""
    o = case.options
    given = knobs.filters_of(o) | {
        "processors": knobs.processors_of(o, vocab),
        "mask": np.ones((ROWS, vocab), bool) if o.mask is None else o.mask,
        "logit_bias": np.zeros((ROWS, vocab), np.float32) if o.logit_bias is None else o.logit_bias,
    }
    static = (("scale", o.scale), ("valid_vocab", o.valid_vocab), ("soft_cap", o.soft_cap))
    keys, words = heads.keys_of(case.seed, ROWS)
    return knobs.answers(case.logits, keys, given, static), words


@knobs.checked(max_examples=50)
@given(knobs.processor_cases(VOCAB))
def test_every_answer_under_every_combination(case):
    """Numbers are eighths and powers of two, so the logits are exact and so are kept set and tokens."""
    knobs.assert_answers(case, *ask(case, VOCAB))


@knobs.checked(max_examples=20)
@given(knobs.processor_cases(VOCAB, exact=False))
def test_log_probs_of_any_numbers(case):
    """Without exact logits the order of near-equals is open: log-probs on our own kept set, which must hold its mass."""
    case = case._replace(
        options=case.options._replace(
            scale=0.7, soft_cap=3.0, valid_vocab=None, temperature=np.maximum(case.options.temperature, 0.25)
        )
    )
    got, _ = ask(case, VOCAB)
    want = oracle.laws(case.logits, case.options)
    kept = np.asarray(got.kept)
    lawless = np.isnan(want.tempered).any(1)
    in_set = np.where(kept | lawless[:, None], want.logits, -np.inf)
    t = oracle.per_row(oracle.f32(case.options.temperature), ROWS)
    processed = oracles.log_softmax(in_set, t)
    knobs.assert_log_probs(got.log_probs, processed, 1e-4)
    token, i = np.asarray(got.draw.token), np.arange(ROWS)
    np.testing.assert_array_equal(token == -1, lawless)
    for name, law in (("model_log_prob", want.model), ("tempered_log_prob", want.tempered), ("processed_log_prob", processed)):
        knobs.assert_log_probs(getattr(got.draw, name), np.where(lawless, np.nan, law[i, token]), 1e-4)
    for row in np.flatnonzero(~lawless):  # the set differs from the oracle's by tokens that are near-equal to its last one
        turned = np.flatnonzero(kept[row] != want.kept[row])
        turned = turned[~want.near[row, turned]]
        edge = want.logits[row, want.kept[row]].min()
        assert np.all(np.abs(want.logits[row, turned] - edge) < 1e-4)


# One processor at a time, absent ones absent


EXAMPLES = {
    "bias": (
        {"bias_tokens": [3, 3, 7, -1], "bias_values": [1.0, 0.5, -2.0, 9.0]},
        {"sparse_bias": [(3, 1.0), (3, 0.5), (7, -2.0)]},
    ),
    "repetition": ({"repetition_penalty": 2.0, "counts": True}, {"repetition": 2.0}),
    "presence": ({"presence_penalty": 0.5, "counts": True}, {"presence": 0.5}),
    "frequency": ({"frequency_penalty": 0.25, "counts": True}, {"frequency": 0.25}),
    "allowed": ({"allowed_tokens": [1, 3, 50, 82, -1]}, {"allowed": [1, 3, 50, 82]}),
    "banned": ({"banned_tokens": [0, 1, 2, -1]}, {"banned": [0, 1, 2]}),
    "ends": (
        {"end_tokens": [0, 9], "min_new_tokens": 3, "num_new_tokens": [0, 2, 3, 9]},
        {"end_tokens": [0, 9], "min_new": [9, 9, 0, 0]},
    ),
}
PROMPT, OUTPUT = [[1, 1, 3], [], [5], [82, 0, 1]], [[3, 3, 7], [], [9, 9, 9], [0]]


@pytest.mark.parametrize(
    "names", [(n,) for n in EXAMPLES] + list(itertools.combinations(EXAMPLES, 2))[::4] + [tuple(EXAMPLES)], ids="+".join
)
def test_processors_that_are_left_out_are_off(names):
    rng = np.random.default_rng(0)
    logits = np.stack([knobs.row_of("grid", VOCAB, rng) for _ in range(ROWS)])
    ours, theirs = {}, {"prompt": PROMPT, "output": OUTPUT}
    for name in names:
        ours |= EXAMPLES[name][0]
        for key, value in EXAMPLES[name][1].items():
            of_rows = key in ("sparse_bias", "allowed", "banned", "end_tokens")
            theirs[key] = [value] * ROWS if of_rows else value
    if "counts" in ours:
        ours["counts"] = count_tokens(knobs.padded(PROMPT), VOCAB).add(knobs.padded(OUTPUT))
    want = oracle.laws(logits, Options(**theirs))
    h, w = knobs.logits_head(logits)
    keys, words = heads.keys_of(0, ROWS)
    processors = Processors(**ours)
    out = gumbeljax.sample_with_log_probs(h, w, keys, processors=processors)
    heads.assert_pathwise(out.token, want.logits, words)
    np.testing.assert_allclose(out.tempered_log_prob, want.tempered[np.arange(ROWS), out.token], atol=2e-5)
    knobs.assert_log_probs(gumbeljax.processed_log_probs(h, w, processors=processors), want.processed)
    np.testing.assert_array_equal(gumbeljax.greedy(h, w, processors=processors), want.logits.argmax(-1))


def test_a_penalty_is_differentiated_with_respect_to_the_head():
    """`log_prob` through the penalties: the chain rule of x / r and x * r."""
    h, w = jnp.ones((1, 1)), jnp.array([[2.0], [-2.0], [0.5], [0.25]])
    processors = Processors(repetition_penalty=2.0, presence_penalty=0.5, counts=count_tokens([[0]], 4).add([[1]]))
    got = jax.grad(lambda w: gumbeljax.log_prob(h, w, jnp.array([0]), processors=processors)[0])(w)[:, 0]
    p = np.exp(oracles.log_softmax([[1.0, -4.5, 0.5, 0.25]]))[0]
    np.testing.assert_allclose(got, (np.eye(4)[0] - p) * [0.5, 2.0, 1.0, 1.0], atol=1e-6)


# Counts


def test_counts_in_one_go_step_by_step_and_by_hand():
    rng = np.random.default_rng(0)
    prompt, output = rng.integers(-1, 9, (3, 7)), rng.integers(-1, 9, (3, 16))
    start = count_tokens(prompt, 9, lengths=np.array([7, 3, 0]))
    steps = jax.lax.scan(lambda c, t: (c.add(t), None), start, jnp.asarray(output.T))[0]
    chex.assert_trees_all_equal(steps, start.add(output))
    for i, n in enumerate([7, 3, 0]):
        np.testing.assert_array_equal(start.in_prompt[i], [v in prompt[i, :n] for v in range(9)])
        np.testing.assert_array_equal(steps.output[i], [(output[i] == v).sum() for v in range(9)])
    one = count_tokens(prompt[0], 9).add(output[0])
    np.testing.assert_array_equal(one.output, steps.output[0])
    beyond = start.add(jnp.full(3, 9)).add(jnp.full(3, -1)).add(jnp.full(3, 2**31 - 1)).add(jnp.full(3, -(2**31)))
    chex.assert_trees_all_equal(beyond, start)


@chex.assert_max_traces(n=1)
def _step(carry, x):
    logits, key, numbers = x
    counts, length = carry
    processors = Processors(
        **numbers, counts=counts, end_tokens=jnp.array([0]), num_new_tokens=length, min_new_tokens=jnp.array([0, 5, 2, 9])
    )
    token = gumbeljax.sample(*knobs.logits_head(logits), key, processors=processors, top_k=jnp.full(ROWS, 20))
    return (counts.add(token), length + 1), token


def test_penalties_that_change_in_a_compiled_loop():
    """Counts are in the carry; every number changes each step; one trace; the oracle follows with lists."""
    steps, rng = 12, np.random.default_rng(0)
    logits = np.round(rng.normal(size=(steps, ROWS, 30)) * 8).astype(np.float32) / 8
    keys = jax.random.split(jax.random.key(0), (steps, ROWS))
    numbers = {
        "repetition_penalty": rng.choice([0.5, 1, 2, 4], (steps, ROWS)),
        "presence_penalty": rng.integers(0, 9, (steps, ROWS)) / 8,
        "frequency_penalty": rng.integers(0, 9, (steps, ROWS)) / 8,
    }
    prompt = [[1, 2], [3], [], [4, 4]]
    start = count_tokens(knobs.padded(prompt), 30), jnp.zeros(ROWS, jnp.int32)
    (counts, _), tokens = jax.jit(lambda *x: jax.lax.scan(_step, start, x))(logits, keys, jax.tree.map(jnp.float32, numbers))
    output = [[] for _ in range(ROWS)]
    for i in range(steps):
        options = Options(
            prompt=prompt,
            output=output,
            repetition=numbers["repetition_penalty"][i],
            presence=numbers["presence_penalty"][i],
            frequency=numbers["frequency_penalty"][i],
            top_k=20,
            end_tokens=[[0]] * ROWS,
            min_new=[0, 5, 2, 9],
        )
        want = oracle.laws(logits[i], options)
        heads.assert_pathwise(tokens[i], np.where(want.kept, want.logits, -np.inf), jax.random.key_data(keys[i]))
        output = [[*o, int(t)] for o, t in zip(output, tokens[i], strict=True)]
    np.testing.assert_array_equal(counts.output, [np.bincount(o, minlength=30) for o in output])


def test_no_retrace_when_processors_change():
    h, w = heads.exact_head(40, 16, ROWS)

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(key, filters, processors, mask, bias):
        return gumbeljax.sample(h, w, key, processors=processors, mask=mask, logit_bias=bias, **filters)

    rng = np.random.default_rng(0)
    for i in range(4):
        counts = count_tokens(rng.integers(0, 40, (ROWS, 3)), 40).add(rng.integers(0, 40, (ROWS, 5)))
        processors = knobs.processors_of(
            Options(
                repetition=rng.uniform(0.5, 2, ROWS),
                presence=rng.normal(size=ROWS),
                frequency=rng.normal(size=ROWS),
                banned=[[i]] * ROWS,
                end_tokens=[[i + 9]] * ROWS,
                sparse_bias=[[(i, 1.0)]] * ROWS,
                min_new=i * 3,
            ),
            40,
            counts=counts,
        )
        tokens = step(
            jax.random.key(i),
            knobs.filters_of(Options(1.0 + i, i, 1 - i / 9, i / 9)),
            processors,
            rng.random(40) < 0.9,
            rng.normal(size=40).astype(np.float32),
        )
        assert np.all((np.asarray(tokens) >= 0) & (np.asarray(tokens) != i))


# Packed masks


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 64, 100])
@pytest.mark.parametrize("dtype", [np.uint32, np.int32])
def test_a_packed_mask_is_the_mask(vocab, dtype):
    rng = np.random.default_rng(vocab)
    allowed = rng.random((3, vocab)) < 0.5
    words = -(-vocab // 32)
    bits = np.zeros((3, 32 * words), np.uint64)
    bits[:, :vocab] = allowed
    bits[:, vocab:] = 1  # beyond the vocabulary: ignored
    packed = (bits.reshape(3, words, 32) << np.arange(32, dtype=np.uint64)).sum(-1).astype(np.uint32).view(dtype)
    h, w = knobs.logits_head(np.zeros((3, vocab)))
    np.testing.assert_array_equal(gumbeljax.kept_tokens(h, w, mask=packed), allowed)
    np.testing.assert_array_equal(gumbeljax.kept_tokens(h, w, mask=packed[0]), allowed[:1].repeat(3, 0))


def test_users_may_forbid_rank_promotion():
    h, w = heads.exact_head(70, 16, 3)
    with jax.numpy_rank_promotion("raise"):
        counts = count_tokens([[1, 2], [3, 4], [5, 6]], 70, lengths=jnp.array([2, 1, 0])).add(jnp.arange(3))
        processors = knobs.processors_of(Options(repetition=2.0, frequency=0.5, end_tokens=[[1]] * 3, min_new=2), 70, 3, counts)
        options = {
            "processors": processors,
            "mask": np.full((3, 3), -1, np.int32),
            **knobs.filters_of(Options(0.5, 5, 0.9, 0.1), 3),
        }
        tokens = gumbeljax.sample(h, w, jax.random.key(0), **options)
        kept = np.asarray(gumbeljax.kept_tokens(h, w, **options))
    assert kept[np.arange(3), tokens].all() and counts.in_prompt.sum(1).tolist() == [2, 1, 0]


# Top-n log-probs and ranks


def test_top_log_probs_and_ranks():
    rng = np.random.default_rng(0)
    logits = np.stack([knobs.row_of(kind, 100, rng) for kind in knobs.KINDS])
    rows = len(logits)
    h, w = knobs.logits_head(logits)
    for num, options in ((100, {"temperature": 0.5}), (20, {"top_k": 7, "mask": np.arange(100) % 3 > 0})):
        law = oracle.laws(logits, Options(**options))
        tokens, values = oracle.best_tokens(law.processed, num)
        for asked in (np.zeros(rows, int), np.full(rows, 99), np.full(rows, -1), np.full(rows, 100), tokens[:, 1]):
            top = gumbeljax.top_log_probs(h, w, num, tokens=asked, **options)
            np.testing.assert_array_equal(top.tokens, tokens)
            np.testing.assert_allclose(top.log_probs, values, rtol=2e-5, atol=2e-5)
            np.testing.assert_array_equal(top.rank, oracle.rank(law.processed, law.logits, asked))
    with pytest.raises(ValueError, match=r"^num must be at most the number of tokens, 90; got 91"):
        gumbeljax.top_log_probs(h, w, 91, valid_vocab=90)
    with pytest.raises(ValueError, match=r"^num must be at least 1"):
        gumbeljax.top_log_probs(h, w, 0)


def test_top_log_probs_of_a_real_head():
    vocab = 5003
    h, w = heads.exact_head(vocab, 64, 8)
    logits = heads.exact_logits(h, w)
    drawn = np.arange(8) * 700
    top = gumbeljax.top_log_probs(h, w, 20, tokens=drawn)
    for i in range(8):
        order = oracle.descending(logits[i].astype(np.float64))
        np.testing.assert_array_equal(top.tokens[i], order[:20])
        assert top.rank[i] == np.flatnonzero(order == drawn[i])[0] + 1
    transposed = gumbeljax.top_log_probs(h, w.T, 20, tokens=drawn, vocab_axis=1)
    chex.assert_trees_all_close(transposed, top, atol=1e-5)


# Options from a configuration


def test_options_from_a_configuration():
    assert options_from_config({}) == {"temperature": 0.0}
    assert options_from_config({"do_sample": False, "temperature": 0.7}) == {"temperature": 0.0}
    full = {
        "bos_token_id": 151643,
        "pad_token_id": 151643,
        "do_sample": True,
        "eos_token_id": [151645, 151643],
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.8,
        "min_p": 0.05,
        "repetition_penalty": 1.05,
        "max_new_tokens": 512,
        "transformers_version": "4.51.0",
        "num_beams": 1,
        "typical_p": 1.0,
        "suppress_tokens": [5, 6],
        "min_new_tokens": 4,
        "use_cache": True,
    }
    got = options_from_config(full)
    processors = got.pop("processors")
    assert got == {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05}
    wanted = Processors(repetition_penalty=1.05, banned_tokens=[5, 6], end_tokens=[151645, 151643], min_new_tokens=4)
    assert processors == wanted
    assert options_from_config({"do_sample": True, "eos_token_id": 2, "min_new_tokens": 3})["processors"].end_tokens == [2]
    ends = {"do_sample": True, "eos_token_id": np.int64(2), "min_new_tokens": 3}
    assert options_from_config(ends)["processors"].end_tokens == [2]
    neutral = {
        "do_sample": True,
        "temperature": None,
        "top_p": None,
        "repetition_penalty": 1.0,
        "suppress_tokens": None,
        "no_repeat_ngram_size": 0,
        "bad_words_ids": [],
        "sequence_bias": {},
        "guidance_scale": 1,
        "penalty_alpha": 0.0,
        "min_new_tokens": None,
    }
    assert options_from_config(neutral) == {}


@pytest.mark.parametrize(
    "name, value",
    [
        ("num_beams", 4),
        ("typical_p", 0.9),
        ("no_repeat_ngram_size", 3),
        ("epsilon_cutoff", 1e-3),
        ("eta_cutoff", 1e-3),
        ("penalty_alpha", 0.6),
        ("bad_words_ids", [[1, 2]]),
        ("min_length", 10),
        ("guidance_scale", 1.5),
        ("sequence_bias", {(1,): 2.0}),
        ("encoder_repetition_penalty", 1.2),
    ],
)
def test_options_that_change_the_law_are_not_passed_over(name, value):
    with pytest.raises(NotImplementedError, match=rf"^{name} must be"):
        options_from_config({"do_sample": True, name: value})


def test_a_configuration_draws():
    config = {
        "do_sample": True,
        "temperature": 0.5,
        "top_k": 5,
        "repetition_penalty": 2.0,
        "eos_token_id": 0,
        "min_new_tokens": 2,
    }
    logits = np.round(np.random.default_rng(0).normal(size=(ROWS, VOCAB)) * 16).astype(np.float32) / 8
    options = options_from_config(config)
    prompt, output = [[1], [2, 3], [], [4]], [[0], [5, 5], [9], []]
    options["processors"] = options["processors"]._replace(
        counts=count_tokens(knobs.padded(prompt), VOCAB).add(knobs.padded(output))
    )
    want = oracle.laws(
        logits, Options(0.5, 5, prompt=prompt, output=output, repetition=2.0, end_tokens=[[0]] * ROWS, min_new=2)
    )
    np.testing.assert_array_equal(gumbeljax.kept_tokens(*knobs.logits_head(logits), **options), want.kept)
