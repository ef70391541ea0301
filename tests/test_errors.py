"""Every message of the checks: one sentence that names the argument, the rule, what was got, and where it helps the fix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gumbeljax
from gumbeljax import _checks
from gumbeljax._keys import typed_key

KEY = jax.random.key(0)
H, W = jnp.zeros((2, 16)), jnp.zeros((100, 16))
LOGITS = jnp.zeros((2, 100))
TOKENS = jnp.zeros(2, jnp.int32)


def sample(h=H, w=W, key=KEY, **options):
    return lambda: gumbeljax.sample(h, w, key, **options)


def by_name(**options):
    """The same option on every entry point that takes it."""
    calls = [lambda: gumbeljax.sample(H, W, KEY, **options), lambda: gumbeljax.sample_with_log_probs(H, W, KEY, **options)]
    if not options.keys() & {"num_samples", "method", "mode", "replace"}:
        calls.append(lambda: gumbeljax.log_prob(H, W, TOKENS, **options))
        if "temperature" not in options:
            calls.append(lambda: gumbeljax.greedy(H, W, **options))
    if not options.keys() & {"vocab_axis", "scale", "soft_cap", "precision", "implementation"}:
        calls.append(lambda: gumbeljax.sample_logits(LOGITS, KEY, **options))
    return calls


FLOAT_RULE = "must be bfloat16, float16 or float32; got"
CASES = [  # (calls, exception, the whole message as a pattern)
    # _checks.float_array
    (
        [sample(h=H.astype(jnp.int32)), lambda: gumbeljax.greedy(H.astype(jnp.int32), W)],
        TypeError,
        rf"h {FLOAT_RULE} int32: cast it with h\.astype\(jnp\.float32\)\.",
    ),
    ([sample(w=W > 0)], TypeError, rf"w {FLOAT_RULE} bool: cast it with w\.astype\(jnp\.float32\)\."),
    (
        [sample(w=W.astype(jnp.int8)), lambda: gumbeljax.log_prob(H, W.astype(jnp.int8), TOKENS)],
        TypeError,
        rf"w {FLOAT_RULE} int8: cast it with w\.astype\(jnp\.float32\), or pass gumbeljax\.QuantizedHead\(w, scale\)\.",
    ),
    (
        [lambda: gumbeljax.sample_logits(LOGITS.astype(jnp.int32), KEY)],
        TypeError,
        rf"logits {FLOAT_RULE} int32: cast it with logits\.astype\(jnp\.float32\)\.",
    ),
    (
        by_name(logit_bias=jnp.zeros(100, jnp.int32)),
        TypeError,
        rf"logit_bias {FLOAT_RULE} int32: cast it with logit_bias\.astype\(jnp\.float32\)\.",
    ),
    # _checks.head
    (
        by_name(vocab_axis=2),
        ValueError,
        r"vocab_axis must be 0 for w \[vocab, d_model\] or 1 for w \[d_model, vocab\]; got 2.*\.",
    ),
    (
        by_name(vocab_axis="d"),
        ValueError,
        r"vocab_axis must be 0 for w \[vocab, d_model\] or 1 for w \[d_model, vocab\]; got 'd'.*\.",
    ),
    ([sample(w=W[0])], ValueError, r"w must be \[vocab, d_model\]; got shape \[16\]: pass the two-dimensional output table\."),
    ([sample(w=W[None])], ValueError, r"w must be \[vocab, d_model\]; got shape \[1, 100, 16\]: pass the two-dimensional .*\."),
    ([sample(h=jnp.float32(0))], ValueError, r"h must be \[\*batch, d_model\]; got a scalar: pass the hidden states\."),
    (
        [sample(w=W.T)],
        ValueError,
        r"h must end in d_model = 100, that of w \[16, 100\] read as \[vocab, d_model\]; got h \[2, 16\]: "
        r"for a w of the other layout pass vocab_axis=1\.",
    ),
    (
        [sample(vocab_axis=1)],
        ValueError,
        r"h must end in d_model = 100, that of w \[100, 16\] read as \[d_model, vocab\]; got h "
        r"\[2, 16\]: for a w of the other layout pass vocab_axis=0\.",
    ),
    ([sample(w=W[:0])], ValueError, r"w must have at least one token and one coordinate; got shape \[0, 16\].*\."),
    (
        [sample(h=H[:, :0], w=W[:, :0])],
        ValueError,
        r"w must have at least one token and one coordinate; got shape \[100, 0\].*\.",
    ),
    (
        [lambda: gumbeljax.sample_logits(LOGITS[:, :0], KEY)],
        ValueError,
        r"logits must be \[\*batch, vocab\] with at least one token; got shape \[2, 0\]: put the vocabulary on the last axis\.",
    ),
    (
        [lambda: gumbeljax.sample_logits(jnp.float32(1), KEY)],
        ValueError,
        r"logits must be \[\*batch, vocab\] with at least one token; got shape \[\].*\.",
    ),
    # _checks.vocabulary
    (by_name(valid_vocab=0), ValueError, r"valid_vocab must be between 1 and the vocabulary of w, 100; got 0.*\."),
    (by_name(valid_vocab=-5), ValueError, r"valid_vocab must be between 1 and the vocabulary of w, 100; got -5.*\."),
    (by_name(valid_vocab=101), ValueError, r"valid_vocab must be between 1 and the vocabulary of w, 100; got 101.*\."),
    (
        by_name(valid_vocab=50.0),
        TypeError,
        r"valid_vocab must be a Python int; got float: it sets shapes, so it cannot be traced\.",
    ),
    (by_name(valid_vocab=True), TypeError, r"valid_vocab must be a Python int; got bool: .*\."),
    (by_name(valid_vocab=jnp.int32(5)), TypeError, r"valid_vocab must be a Python int; got ArrayImpl: .*\."),
    # _checks.per_row, _checks.temperature
    (by_name(temperature="1"), TypeError, r"temperature must be a number or an array of shape \[2\]; got '1'.*\."),
    (by_name(temperature=None), TypeError, r"temperature must be a number or an array of shape \[2\]; got None.*\."),
    (by_name(temperature=1j), TypeError, r"temperature must be real; got dtype complex64: cast it to float32\."),
    (by_name(temperature=True), TypeError, r"temperature must be real; got dtype bool: cast it to float32\."),
    (
        by_name(temperature=np.ones(3)),
        ValueError,
        r"temperature must be a scalar or have the batch's shape \[2\]; got \[3\]: give every row its own\.",
    ),
    (
        by_name(temperature=np.ones(1)),
        ValueError,
        r"temperature must be a scalar or have the batch's shape \[2\]; got \[1\].*\.",
    ),
    (
        by_name(temperature=np.ones((2, 1))),
        ValueError,
        r"temperature must be a scalar or have the batch's shape \[2\]; got \[2, 1\]: reshape it to \[2\]\.",
    ),
    (by_name(temperature=-1), ValueError, r"temperature must be finite and at least 0 \(0 is greedy\); got -1.*\."),
    (by_name(temperature=-1e-30), ValueError, r"temperature must be finite and at least 0 \(0 is greedy\); got -1e-30.*\."),
    (by_name(temperature=float("nan")), ValueError, r"temperature must be finite and at least 0 \(0 is greedy\); got nan.*\."),
    (by_name(temperature=float("inf")), ValueError, r"temperature must be finite and at least 0 \(0 is greedy\); got inf.*\."),
    (
        by_name(temperature=[1.0, -0.25]),
        ValueError,
        r"temperature must be finite and at least 0 \(0 is greedy\); got -0\.25.*\.",
    ),
    (by_name(temperature=jnp.array([jnp.nan, 1.0])), ValueError, r"temperature must be finite and at least 0 .*; got nan.*\."),
    # _checks.per_token, _checks.dense_bias
    (
        by_name(mask=np.ones(100)),
        TypeError,
        r"mask must be boolean, True for allowed tokens, or packed bits in uint32; got dtype float(32|64): write mask != 0\.",
    ),
    (
        by_name(mask=np.ones(100, np.int8)),
        TypeError,
        r"mask must be boolean, True for allowed tokens, or packed bits in uint32; got dtype int8: write mask != 0\.",
    ),
    (
        by_name(mask=np.ones(100, np.int32)),
        ValueError,
        r"mask of packed bits must be \[4\] or \[2, 4\], one bit for each of the 100 tokens of w; got \[100\]: pad it to 4 "
        r"words, or, if it is one number a token, write mask != 0\.",
    ),
    (
        by_name(mask=np.bool_(True)),
        ValueError,
        r"mask must be as wide as the vocabulary of w, 100; got width none \(a scalar\): .*\.",
    ),
    (
        by_name(logit_bias=0.5),
        ValueError,
        r"logit_bias must be as wide as the vocabulary of w, 100; got width none \(a scalar\): .*\.",
    ),
    (
        by_name(mask=np.ones(90, bool)),
        ValueError,
        r"mask must be as wide as the vocabulary of w, 100; got width 90: pad it to 100\.",
    ),
    (
        by_name(logit_bias=np.zeros((2, 7))),
        ValueError,
        r"logit_bias must be as wide as the vocabulary of w, 100; got width 7: .*\.",
    ),
    (by_name(mask=np.ones((3, 100), bool)), ValueError, r"mask must be \[100\] or \[2, 100\]; got \[3, 100\].*\."),
    (by_name(logit_bias={100: 1.0}), ValueError, r"logit_bias must name token ids from 0 to 99; got 100.*\."),
    (by_name(logit_bias={"the": 1.0}), ValueError, r"logit_bias must name token ids from 0 to 99; got 'the'.*\."),
    (by_name(logit_bias={50: 1.0}, valid_vocab=50), ValueError, r"logit_bias must name token ids from 0 to 49; got 50.*\."),
    # _checks.constant
    (by_name(scale="big"), TypeError, r"scale must be a Python number, fixed when the call is traced; got str.*\."),
    (
        by_name(scale=jnp.float32(1)),
        TypeError,
        r"scale must be a Python number, fixed when the call is traced; got ArrayImpl.*\.",
    ),
    (by_name(soft_cap=True), TypeError, r"soft_cap must be a Python number, fixed when the call is traced; got bool.*\."),
    (by_name(scale=float("inf")), ValueError, r"scale must be finite; got inf.*\."),
    (by_name(soft_cap=0.0), ValueError, r"soft_cap must be finite and positive; got 0\.0.*\."),
    (by_name(soft_cap=-30), ValueError, r"soft_cap must be finite and positive; got -30.*\."),
    (by_name(soft_cap=float("nan")), ValueError, r"soft_cap must be finite and positive; got nan.*\."),
    # _checks.choice
    (by_name(method="gumbel"), ValueError, r"method must be one of 'grouped', 'categorical'; got 'gumbel'.*\."),
    ([lambda: gumbeljax.sample_logits(np.zeros((1, 2**20), np.float32), KEY, top_p=0.5)], ValueError,
     r"top_p must be None for more than 1048575 tokens.*; got 1048576: use top_k or min_p\."),
    (by_name(mode="high"), ValueError, r"mode must be None with method='grouped'.*; got 'high'.*\."),
    (by_name(replace=False), ValueError, r"replace must be True for a single draw; got False: pass num_samples.*\."),
    (by_name(method="categorical", mode="exact"), ValueError, r"mode must be one of .*'low', 'high'.*; got 'exact'.*\."),
    (by_name(precision="tf32"), ValueError, r"precision must be one of 'default', 'high', 'highest'; got 'tf32'.*\."),
    (
        by_name(implementation="cuda"),
        ValueError,
        r"implementation must be one of None, 'xla', 'triton', 'mosaic'; got 'cuda'.*\.",
    ),
    # _checks.count
    (by_name(num_samples=0), ValueError, r"num_samples must be at least 1; got 0.*\."),
    (by_name(num_samples=-3), ValueError, r"num_samples must be at least 1; got -3.*\."),
    (
        by_name(num_samples=2.0),
        TypeError,
        r"num_samples must be a Python int, since it sets the shape of the result; got float.*\.",
    ),
    (
        by_name(num_samples=True),
        TypeError,
        r"num_samples must be a Python int, since it sets the shape of the result; got bool.*\.",
    ),
    (
        by_name(num_samples=101, replace=False),
        ValueError,
        r"num_samples must be at most the number of tokens, 100, when replace=False; got 101: ask for fewer, or leave "
        r"replace out\.",
    ),
    (
        by_name(num_samples=51, replace=False, valid_vocab=50),
        ValueError,
        r"num_samples must be at most the number of tokens, 50, when replace=False; got 51.*\.",
    ),
    # _checks.token_ids
    (
        [lambda: gumbeljax.log_prob(H, W, jnp.zeros(2))],
        TypeError,
        r"tokens must be integers; got dtype float32: cast them to int32\.",
    ),
    (
        [lambda: gumbeljax.log_prob(H, W, np.zeros(2, bool))],
        TypeError,
        r"tokens must be integers; got dtype bool: cast them to int32\.",
    ),
    ([lambda: gumbeljax.log_prob(H, W, 3)], ValueError, r"tokens must have the batch's shape \[2\]; got \[\].*\."),
    (
        [lambda: gumbeljax.log_prob(H, W, jnp.zeros((2, 1), jnp.int32))],
        ValueError,
        r"tokens must have the batch's shape \[2\]; got \[2, 1\].*\.",
    ),
    # _keys.typed_key, _keys.row_keys
    (
        [sample(key=0), lambda: gumbeljax.sample_logits(LOGITS, 0), sample(key=0, method="categorical")],
        TypeError,
        r"key must be a JAX random key; got int: pass jax\.random\.key\(seed\)\.",
    ),
    ([sample(key=None)], TypeError, r"key must be a JAX random key; got NoneType: pass jax\.random\.key\(seed\)\."),
    ([sample(key=[0, 1])], TypeError, r"key must be a JAX random key; got list: pass jax\.random\.key\(seed\)\."),
    ([sample(key=np.random.default_rng(0))], TypeError, r"key must be a JAX random key; got Generator: pass .*\."),
    (
        [sample(key=jnp.zeros(2, jnp.int32))],
        TypeError,
        r"key must be a typed key or raw uint32 key data; got int32\[2\]: pass .*\.",
    ),
    ([sample(key=jnp.uint32(3))], TypeError, r"key must be a typed key or raw uint32 key data; got uint32\[\]: pass .*\."),
    (
        [sample(key=jnp.zeros(3, jnp.uint32))],
        TypeError,
        r"key must have 2 words of raw key data on its last axis; got shape \[3\]: pass jax\.random\.key\(seed\)\.",
    ),
    (
        [sample(key=jax.random.split(KEY, 3))],
        ValueError,
        r"key must be one key or an array of keys of the batch's shape \[2\]"
        r"; got shape \[3\]: use jax\.random\.split\(key, \(2,\)\)\.",
    ),
    (
        [sample(key=KEY[None]), sample(key=jax.random.split(KEY, (2, 1)))],
        ValueError,
        r"key must be one key or an array of keys of the batch's shape \[2\]; got shape \[(1|2, 1)\]: use .*\.",
    ),
    (
        [sample(h=H[0], key=KEY[None])],
        ValueError,
        r"key must be one key or an array of keys of the batch's shape \[\]; got shape \[1\]: .*\.",
    ),
    # _implementation.precision_of
    (
        by_name(precision=3),
        TypeError,
        r"precision must be None, 'default', 'high', 'highest' or a jax\.lax\.Precision; got 3.*\.",
    ),
    (
        by_name(precision=("high", "high")),
        TypeError,
        r"precision must be None, 'default', 'high', 'highest' or .*; got \('high', 'high'\).*\.",
    ),
]


@pytest.mark.parametrize("calls, error, message", CASES, ids=[f"{i}-{m.split()[0]}" for i, (_, _, m) in enumerate(CASES)])
def test_message(calls, error, message):
    for call in calls:
        with pytest.raises(error, match=rf"^{message}$") as caught:
            call()
        text = str(caught.value)
        assert type(caught.value) is error
        assert "\n" not in text and "; got " in text and text.endswith(".") and ". " not in text, text


def test_the_same_sentence_while_tracing():
    """Shapes and dtypes are wrong at trace time too, under jit, vmap and scan."""
    wrong = r"^h must end in d_model = 16, that of w \[100, 16\] read as \[vocab, d_model\]; got h \["
    for call in (
        lambda: jax.jit(gumbeljax.sample)(H[:, :9], W, KEY),
        lambda: jax.vmap(lambda h: gumbeljax.sample(h, W, KEY))(H[:, :9]),
        lambda: jax.lax.scan(lambda c, h: (c, gumbeljax.sample(h, W, KEY)), 0, H[:, :9]),
        lambda: jax.eval_shape(gumbeljax.greedy, H[:, :9], W),
    ):
        with pytest.raises(ValueError, match=wrong):
            call()
    with pytest.raises(ValueError, match=r"^temperature must be a scalar or have the batch's shape \[2\]; got \[3\]"):
        jax.jit(lambda t: gumbeljax.sample(H, W, KEY, temperature=t))(jnp.ones(3))
    with pytest.raises(ValueError, match=r"^temperature must be finite and at least 0"):
        jax.jit(lambda h: gumbeljax.sample(h, W, KEY, temperature=-1.0))(H)  # known while tracing
    with pytest.raises(TypeError, match=r"^scale must be a Python number, fixed when the call is traced; got "):
        jax.jit(lambda c: gumbeljax.sample(H, W, KEY, scale=c))(1.0)
    with pytest.raises(ValueError, match=r"^vocab_axis must be 0 .*; got "):
        jax.jit(lambda a: gumbeljax.sample(H, W, KEY, vocab_axis=a))(0)
    with pytest.raises(TypeError, match=r"^num_samples must be a Python int, since it sets the shape of the result; got "):
        jax.jit(lambda n: gumbeljax.sample(H, W, KEY, num_samples=n))(2)


def test_wrong_keys_of_the_other_law():
    with pytest.raises(
        ValueError, match=r"^key must be one key or an array of keys of the batch's shape \[2\]; got shape \[3\].*\.$"
    ):
        gumbeljax.sample(H, W, jax.random.split(KEY, 3), method="categorical")


def test_raw_keys_are_counted_by_the_default_generator_of_the_moment():
    gumbeljax.sample(H, W, jax.random.PRNGKey(0))
    with jax.default_prng_impl("rbg"):
        gumbeljax.sample(H, W, jax.random.PRNGKey(0))
        with pytest.raises(TypeError, match=r"key must have 4 words of raw key data on its last axis"):
            gumbeljax.sample(H, W, np.zeros(2, np.uint32))


def test_names_in_messages_are_the_callers():
    with pytest.raises(TypeError, match=r"^row_key must be a JAX random key; got int"):
        typed_key(3, "row_key")
    with pytest.raises(ValueError, match=r"^rows must be at least 1; got 0"):
        _checks.count(0, "rows")


def test_good_arguments_pass_the_checks():
    """The other side of every rule."""
    for options in (
        {"vocab_axis": -2, "valid_vocab": np.int64(100), "temperature": 0, "scale": 0, "implementation": "xla"},
        {"valid_vocab": 1, "temperature": np.array([0, 3]), "scale": np.float32(0.5), "precision": "high"},
        {"logit_bias": {0: 1, 99: -1.5}, "temperature": -0.0, "soft_cap": 30, "key": jax.random.split(KEY, 2)},
        {"logit_bias": np.zeros((2, 100)), "scale": -2, "precision": jax.lax.Precision.DEFAULT},
        {"num_samples": np.int32(2)},
        {"num_samples": 100, "replace": False},
    ):
        options = {"key": KEY} | options
        assert (gumbeljax.sample(H, W, options.pop("key"), **options) >= 0).all()
    assert int(gumbeljax.sample(H[0], W, KEY, logit_bias=np.zeros((100,)))) >= 0


@pytest.mark.parametrize("call, error, message", [
    (sample(h=None), TypeError, "h must be an array or a number; got NoneType: .*"),
    (sample(w="abc"), TypeError, "w must be an array or a number; got str: .*"),
    (sample(mask={3: True}), TypeError, "mask must be an array or a number; got dict: .*"),
    (sample(logit_bias={3: "x"}), TypeError, r"logit_bias\[3\] must be an array or a number; got str: .*"),
    (sample(logit_bias={3: jnp.ones(2)}), TypeError, r"logit_bias\[3\] must be a number; got float32\[2\]: .*"),
    (sample(temperature=10**40), ValueError, "temperature must fit in 32 bits; got 1000.*: .*"),
    (sample(temperature=object()), TypeError, "temperature must be an array or a number; got object: .*"),
    (sample(temperature=1e39), ValueError, "temperature must be finite and at least 0 .*; got 1e[+]39: .*"),
    (sample(scale=1e39), ValueError, "scale must be finite; got 1e[+]39: .*"),
    (sample(soft_cap=1e-40), ValueError, "soft_cap must be finite and positive; got 1e-40: .*"),
    (sample(vocab_axis=0.0), ValueError, "vocab_axis must be 0 .*; got 0.0: .*"),
    (sample(replace=jnp.array(False)), TypeError, "replace must be True or False, .*; got ArrayImpl.*"),
    (sample(implementation=np.array(["xla"])), ValueError, "implementation must be one of .*; got array.*"),
    (sample(replace=None, num_samples=2), TypeError, "replace must be True or False, .*; got NoneType: make it a constant"),
    (sample(h=np.ones((2, 16), ">f4")), TypeError, "h must be .*; got ndarray of dtype >f4, which jax does not have: .*"),
    (sample(temperature=-1e-60), ValueError, "temperature must be finite and at least 0 .*; got -1e-60: .*"),
    (sample(top_p=1.0000001), ValueError, "top_p must be between 0 and 1 .*; got 1.0000001: .*"),
    (sample(mask=[-1] * 4), TypeError, r"mask must be boolean, .*; got dtype int64: .* np.asarray\(mask, np.uint32\) for .*"),
    (sample(h=[[1.0], [1.0, 2.0]]), TypeError, "h must be an array or a number; got list: pass a jax or numpy array"),
    (sample(mask=[[True], [True, False]]), ValueError, "mask must be lists of one length; got lists of several: .*"),
    (sample(row_offset=-1), ValueError, r"row_offset must be from 0 to 2\^32 - 1; got -1: .*"),
    (sample(row_offset=2**40), ValueError, "row_offset must be from 0 to .*; got 1099511627776: .*"),
    (sample(num_samples=2**23 + 1), ValueError, "num_samples must be at most 8388608, .*; got 8388609: .*"),
    (lambda: gumbeljax.log_prob(H, W, None), TypeError, "tokens must be integers; got dtype object: .*"),
])
def test_things_that_are_no_arrays(call, error, message):
    with pytest.raises(error, match=rf"^{message}\.$"):
        call()
