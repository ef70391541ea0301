"""The oracles and the gates themselves: published check values, jax's own bits, exact laws, and wrong laws rejected."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from tests import oracles
from tests import statistics as gates

LOGITS = np.array([0.3, -1.2, 2.0, 0.0, 1.1, -0.4, 0.9, 1.7, -2.0, 0.2, 1.4, -0.7])


def _row_keys(seed, rows):
    return oracles.row_keys_of(jax.random.key_data(jax.random.key(seed)), rows)


def _softmax(x):
    return np.exp(x - oracles.logsumexp(x))


def _counts(tokens, vocab):
    return np.bincount(np.asarray(tokens).ravel(), minlength=vocab)


# Noise


@pytest.mark.parametrize(
    ("key", "counter", "words"),
    [
        ((0x00000000, 0x00000000), (0x00000000, 0x00000000), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_threefry_known_answers(key, counter, words):
    """The known-answer vectors published with Random123 for threefry2x32 with 20 rounds."""
    assert tuple(int(x) for x in oracles.threefry2x32(*key, *counter)) == words


def test_threefry_is_the_one_of_jax():
    key = jax.random.key(20260731)
    data = np.asarray(jax.random.key_data(key))
    folded = jax.random.key_data(jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(1000)))
    np.testing.assert_array_equal(oracles.row_keys_of(data, 1000), folded)
    # Partitionable bits: element counter = linear index, the two words xored.
    w0, w1 = oracles.threefry2x32(data[0], data[1], 0, np.arange(999))
    np.testing.assert_array_equal(w0 ^ w1, jax.random.bits(key, (999,)))


def test_uniform_ends():
    zero, full = np.array([0], np.uint32), np.array([2**32 - 1], np.uint32)
    assert oracles.uniform(zero, zero)[0] == np.float32(2.0**-65)
    assert oracles.uniform(full, full)[0] == np.float32(1 - 2.0**-24)
    assert oracles.uniform(zero, zero).dtype == np.float32


def test_noise_is_standard_gumbel_with_a_full_tail():
    noise = oracles.gumbel(11, 12, oracles.stream(oracles.DRAW, 0, oracles.TOKEN_LEVEL), np.arange(2_000_000))
    assert gates.gumbel_ks(noise) > gates.ALPHA
    tail = noise[noise > 8] - 8  # about 670 of them; the overshoot is exponential, up to e^-8
    assert stats.ks_1samp(tail, lambda x: -np.expm1(-x)).pvalue > gates.ALPHA
    assert gates.frequency_within(len(tail), len(noise), -np.expm1(-np.exp(-8.0)))


def test_streams_are_distinct_and_clear_of_fold_in():
    ids = [
        oracles.stream(p, s, level)
        for p in range(7)
        for s in (0, 1, 2**23 - 1)
        for level in (oracles.GROUP_LEVEL, oracles.TOKEN_LEVEL)
    ]
    assert len(set(ids)) == len(ids)
    assert min(ids) >= 2**31
    assert max(ids) < 2**32


# Processed logits and laws


def test_processing_order():
    raw = np.array([[4.0, -8.0, 100.0, np.nan, 2.0]])
    got = oracles.processed_logits(
        raw, scale=0.5, soft_cap=3.0, logit_bias=[0, 0, -1, 0, 7], mask=[1, 0, 1, 1, 1], valid_vocab=3
    )
    capped = 3 * np.tanh(raw[0, :3] * 0.5 / 3)
    np.testing.assert_allclose(got.model[0], [*capped, -np.inf, -np.inf])
    np.testing.assert_allclose(got.processed[0], [capped[0], -np.inf, capped[2] - 1, -np.inf, -np.inf])


def test_log_softmax_values_and_degenerate_rows():
    rows = np.array([[2.0, 1, 0], [2, 1, 0], [0, 3, 3], [-np.inf] * 3, [np.nan, 0, 0], [np.inf, 0, 0], [-np.inf, 0, 1]])
    got = oracles.log_softmax(rows, [1, 0.5, 0, 1, 1, 1, 1])
    np.testing.assert_allclose(got[0], [-0.4076, -1.4076, -2.4076], atol=1e-4)
    np.testing.assert_allclose(got[1], [-0.1429, -2.1429, -4.1429], atol=1e-4)
    np.testing.assert_array_equal(got[2], [-np.inf, 0, -np.inf])
    assert np.isnan(got[3:6]).all()
    np.testing.assert_allclose(got[6], [-np.inf, -1.3133, -0.3133], atol=1e-4)


# Draws


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
@pytest.mark.parametrize("vocab", [1, 15, 16, 17, 33, 101])
def test_grouped_law(vocab, temperature):
    logits = np.random.default_rng(vocab).normal(size=vocab) * 1.5
    draw = oracles.grouped_draw(np.tile(logits, (100_000, 1)), _row_keys(vocab, 100_000), temperature)
    probs = _softmax(logits / temperature)
    counts = _counts(draw.tokens, vocab)
    assert vocab == 1 or min(gates.chi_square(counts, probs), gates.g_test(counts, probs)) > gates.ALPHA
    assert gates.ks_gate(draw.tokens, probs)
    excess = (draw.score - temperature * oracles.logsumexp(logits / temperature)) / temperature
    assert gates.gumbel_ks(excess) > gates.ALPHA


def test_degenerate_and_greedy_rows():
    nan, inf = np.nan, np.inf
    rows = np.array([[1, 2, 2.0], [1, 2, 2], [-inf] * 3, [0, nan, 0], [0, inf, 0], [0, 1, 2], [0, 1, 2], [0, 1, 2]])
    temperature = [0, 1e-39, 1, 0, 0, -1, nan, inf]
    keys = _row_keys(0, len(rows))
    np.testing.assert_array_equal(oracles.grouped_tokens(rows, keys, temperature), [1, 1, -1, -1, -1, -1, -1, -1])
    distinct = oracles.grouped_without_replacement(rows, keys, 4, temperature)
    np.testing.assert_array_equal(distinct[:3], [[1, 2, 0, -1], [1, 2, 0, -1], [-1, -1, -1, -1]])
    assert (distinct[3:] == -1).all()


@pytest.mark.parametrize("temperature", [1e-3, 1e-6, 1e-12, 1e-30, 1e-45, 0])
def test_small_temperatures_are_greedy(temperature):
    """CASES A-5."""
    rows = np.tile([2.875, 2.955, 11.0625], (1000, 1))
    assert (oracles.grouped_tokens(rows, _row_keys(1, 1000), temperature) == 2).all()
    others = oracles.log_softmax(rows[:1], temperature)[0]
    assert others[2] == 0
    assert (others[:2] <= -8000).all()


def test_rows_and_samples_do_not_depend_on_their_neighbours():
    rng = np.random.default_rng(3)
    logits, keys = rng.normal(size=(9, 100)), _row_keys(3, 9)
    many = oracles.grouped_tokens(logits, keys, 0.7, num_samples=5)
    assert many.shape == (9, 5)
    for i in range(9):
        assert oracles.grouped_tokens(logits[i : i + 1], keys[i : i + 1], 0.7)[0] == many[i, 0]
    np.testing.assert_array_equal(many[:, 3], oracles.grouped_tokens(logits, keys, 0.7, sample=3))
    assert len({tuple(column) for column in many.T}) == 5


def test_gaps_mark_the_rows_that_a_small_change_turns():
    rng = np.random.default_rng(4)
    logits, keys = rng.normal(size=(20_000, 64)), _row_keys(4, 20_000)
    draw = oracles.grouped_draw(logits, keys)
    moved = oracles.grouped_tokens(logits + rng.uniform(-1e-3, 1e-3, logits.shape), keys)
    turned = moved != draw.tokens
    assert turned.any()
    assert draw.near_tie(4e-3)[turned].all()  # a score moves by at most 1e-3, a gap by at most twice two of those
    assert draw.near_tie(4e-3).mean() < 0.02


@pytest.mark.parametrize(("vocab", "k"), [(5, 2), (5, 5), (18, 2), (33, 2)])
def test_without_replacement_is_plackett_luce(vocab, k):
    """Ordered tuples against the enumeration; 18 and 33 tokens cross groups."""
    logits = np.random.default_rng(vocab).normal(size=vocab)
    rows, keys = np.tile(logits, (60_000, 1)), _row_keys(vocab + k, 60_000)
    draws = oracles.grouped_without_replacement(rows, keys, k, 0.8)
    assert gates.chi_square(*gates.tuple_counts(draws, gates.plackett_luce(_softmax(logits / 0.8), k))) > gates.ALPHA
    np.testing.assert_array_equal(draws[:, 0], oracles.grouped_tokens(rows, keys, 0.8))


def test_without_replacement_keeps_tokens_far_below_the_best():
    """exp(-x) of a token 2,000 nats below its group's best overflows even in float64; the token must still be drawn."""
    logits = np.array([[0.0, -2000.0, -np.inf, -3000.0] + [-np.inf] * 13 + [-1e6]])
    np.testing.assert_array_equal(
        oracles.grouped_without_replacement(logits, _row_keys(0, 1), 6), [[0, 1, 3, 17, -1, -1]]
    )


def test_without_replacement_gives_each_token_once():
    logits = np.random.default_rng(5).normal(size=(50, 70))
    logits[:, ::7] = -np.inf
    draws = np.sort(oracles.grouped_without_replacement(logits, _row_keys(5, 50), 70), axis=-1)
    allowed = [v for v in range(70) if v % 7]
    np.testing.assert_array_equal(draws, np.tile([-1] * 10 + allowed, (50, 1)))


def test_categorical_low_is_the_one_of_jax():
    logits = np.random.default_rng(6).normal(size=(3, 40, 257)).astype(np.float32)
    key = jax.random.key(6)
    got = oracles.categorical_low(logits, jax.random.key_data(key))
    np.testing.assert_array_equal(got, jax.random.categorical(key, logits))


# Gates


def test_gates_pass_the_right_law_and_see_a_small_fault():
    rng = np.random.default_rng(7)
    probs = _softmax(LOGITS)
    good = rng.choice(12, 100_000, p=probs)
    bad = rng.choice(12, 100_000, p=(tilted := 0.97 * probs + 0.03 / 12) / tilted.sum())
    for test in (gates.chi_square, gates.g_test):
        assert test(_counts(good, 12), probs) > gates.ALPHA
        assert test(_counts(bad, 12), probs) < gates.ALPHA
    assert gates.ks_gate(good, probs)
    assert not gates.ks_gate(rng.choice(12, 10_000, p=0.8 * probs + 0.2 / 12), probs)
    assert gates.frequency_within(_counts(good, 12), 100_000, probs)
    assert not gates.frequency_within(_counts(bad, 12), 100_000, probs)


def test_pooling_keeps_sums_and_refuses_impossible_outcomes():
    observed, expected = gates.pooled([90, 8, 1, 1, 0], [0.9, 0.06, 0.03, 0.01, 0.0])
    np.testing.assert_allclose(observed, [90, 10])
    np.testing.assert_allclose(expected, [90, 10])
    with pytest.raises(AssertionError, match="probability zero"):
        gates.chi_square([9, 1], [1.0, 0.0])
    assert not gates.frequency_within(1, 10**6, 0.0)


def test_plackett_luce_by_hand():
    law = gates.plackett_luce([0.5, 0.3, 0.2], 2)
    assert law[0, 1] == pytest.approx(0.5 * 0.3 / 0.5)
    assert law[2, 0] == pytest.approx(0.2 * 0.5 / 0.8)
    assert sum(law.values()) == pytest.approx(1)


# Wrong laws


def test_the_right_race_passes():
    tokens = gates.race_with(LOGITS, 200_000, np.random.default_rng(8))
    assert gates.chi_square(_counts(tokens, 12), _softmax(LOGITS)) > gates.ALPHA


@pytest.mark.parametrize(
    "wrong", [gates.noise_reused_across_groups, gates.noise_reused_across_levels, gates.group_maximum_for_mass]
)
def test_wrong_races_fail(wrong):
    tokens = wrong(LOGITS, 200_000, np.random.default_rng(8))
    assert gates.chi_square(_counts(tokens, 12), _softmax(LOGITS)) < gates.ALPHA


def test_the_right_draw_without_replacement_passes():
    draws = gates.conditioned_over_top_groups(LOGITS, 2, 100_000, np.random.default_rng(9))
    assert gates.chi_square(*gates.tuple_counts(draws, gates.plackett_luce(_softmax(LOGITS), 2))) > gates.ALPHA


@pytest.mark.parametrize("wrong", [gates.one_token_of_each_top_group, gates.fresh_noise_over_top_groups])
def test_wrong_draws_without_replacement_fail(wrong):
    draws = wrong(LOGITS, 2, 100_000, np.random.default_rng(9))
    counts, probs = gates.tuple_counts(draws, gates.plackett_luce(_softmax(LOGITS), 2))
    assert gates.chi_square(counts, probs) < gates.ALPHA
    assert gates.total_variation(counts, probs) > 0.05


def test_bfloat16_noise_fails():
    tokens = gates.race_with(np.zeros(512), 20_000, rng := np.random.default_rng(10), noise=gates.bfloat16_noise(rng))
    assert gates.chi_square(_counts(tokens, 512), np.full(512, 1 / 512)) < gates.ALPHA


def test_capped_noise_loses_the_tail():
    """One head token and a tail of 1%, as ECOSYSTEM's: noise capped at 15.9 draws the tail 0.69% of the time."""
    vocab, n = 49_152, 200_000
    tail = np.log(0.01 / 0.99 / (vocab - 1))
    rng = np.random.default_rng(11)

    def drawn(bits):
        """Count of tail draws: the tail's best noise is the maximum of vocab - 1 values, drawn by its quantile."""
        best = rng.random(n) ** (1 / (vocab - 1))
        head = rng.random(n)
        if bits:
            best, head = (np.floor(u * 2**bits) / 2**bits for u in (best, head))
        best, head = (-np.log(-np.log(np.clip(u, 1e-300, 1 - 1e-16))) for u in (best, head))
        return int((tail + best > head).sum())

    assert gates.frequency_within(drawn(None), n, 0.01)
    assert not gates.frequency_within(drawn(23), n, 0.01)
