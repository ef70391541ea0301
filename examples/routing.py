"""Train a discrete choice with Gumbel-softmax: a router sends each handwritten digit to one of ten prototype images.

A route costs the squared error of its prototype. Router and prototypes are trained on E[cost] - BETA * entropy with one
straight-through draw per image. Theory predicts three numbers: for given prototypes no router gets below
-BETA * mean(log sum exp(-cost / BETA)); with BETA small the prototypes should cost what those of k-means cost; and the
score function's gradient is wrong by chance alone. The relaxation's gradient is plotted against the exact one. Run it
from the repository's root; it needs optax, scikit-learn, matplotlib and half a minute.
"""

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from jax.scipy.special import entr
from sklearn.cluster import KMeans
from sklearn.datasets import load_digits

from gumbeljax.relaxation import gumbel_softmax

ROUTES, HIDDEN, STEPS, BETA, DRAWS = 10, 64, 2000, 0.1, 100_000
TEMPERATURES = np.geomspace(0.05, 10.0, 12)


def init(images, key):
    hidden, out, pick = jax.random.split(key, 3)
    hidden = jax.random.normal(hidden, (images.shape[1], HIDDEN)) / 8
    out = jax.random.normal(out, (HIDDEN, ROUTES)) / 80
    return {"hidden": hidden, "out": out, "prototypes": jax.random.choice(pick, images, (ROUTES,), replace=False)}


def route_logits(params, images):
    return jnp.tanh((images - 0.3) @ params["hidden"]) @ params["out"]


def cost_of(params, images, route):  # a relaxed route is a mixture of prototypes
    return jnp.sum((images - route @ params["prototypes"]) ** 2, axis=-1)


def all_costs(params, images):
    return jax.vmap(cost_of, (None, None, 0), 1)(params, images, jnp.eye(ROUTES))


def loss(params, images, key):
    logits = route_logits(params, images)
    route = gumbel_softmax(logits, key, temperature=0.5, hard=True)
    return jnp.mean(cost_of(params, images, route)) - BETA * mean_entropy(logits)


def mean_entropy(logits):
    return jnp.mean(jnp.sum(entr(jax.nn.softmax(logits)), axis=-1))


@jax.jit
def train(params, images, key):
    optimizer = optax.adam(optax.cosine_decay_schedule(1e-2, STEPS))

    def step(carry, key):
        params, state = carry
        updates, state = optimizer.update(jax.grad(loss)(params, images, key), state)
        return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(step, (params, optimizer.init(params)), jax.random.split(key, STEPS))[0][0]


@jax.jit
def gradient_errors(params, images, key, tau):
    """[3, 3]: for soft, straight-through and score draws the error of the mean gradient over DRAWS, the error that
    chance gives it, and the spread of one draw, over the norm of the exact gradient."""
    logits, costs = route_logits(params, images), all_costs(params, images)
    exact = jax.grad(lambda x: jnp.sum(jax.nn.softmax(x) * costs))(logits)

    def relaxed(x, key, hard=False):
        return jnp.sum(cost_of(params, images, gumbel_softmax(x, key, temperature=tau, hard=hard)))

    def score(x, key):
        return jnp.sum(gumbel_softmax(logits, key, hard=True) * costs * jax.nn.log_softmax(x))

    def errors(f):
        draws = jax.vmap(jax.grad(f), (None, 0))(logits, jax.random.split(key, DRAWS))
        spread = jnp.sqrt(jnp.sum(jnp.var(draws, axis=0)))
        return jnp.stack([jnp.linalg.norm(draws.mean(0) - exact), spread / jnp.sqrt(DRAWS), spread])

    return jnp.stack([errors(f) for f in (relaxed, lambda x, k: relaxed(x, k, True), score)]) / jnp.linalg.norm(exact)


def plot(table):
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    error, chance, spread = np.moveaxis(table, -1, 0)
    bias = np.sqrt(np.where(error > 2 * chance, error**2 - chance**2, np.nan))  # where chance does not explain it
    for i, name in enumerate(("soft", "straight-through")):
        axes[0].loglog(TEMPERATURES, bias[:, i], f"C{i}o-", markersize=3, label=name)
        axes[0].loglog(TEMPERATURES, 2 * chance[:, i], f"C{i}:", linewidth=1, label=f"smallest visible, {name}")
        axes[1].loglog(TEMPERATURES, spread[:, i], f"C{i}o-", markersize=3, label=name)
    axes[1].loglog(TEMPERATURES, spread[:, 2], "C2--", label="score function, no baseline (its bias is 0)")
    for axis, title in zip(axes, ("bias of the gradient", "standard deviation of one draw"), strict=True):
        axis.set(title=title, xlabel="temperature of the relaxation", ylabel="over the norm of the exact gradient")
        axis.legend(frameon=False, fontsize=8)
    figure.savefig("docs/images/gumbel_softmax_gradient.png", dpi=130)


def main():
    images = jnp.asarray(load_digits().data / 16, jnp.float32)
    start = init(images, jax.random.key(0))
    params = train(start, images, jax.random.key(1))
    logits, costs = route_logits(params, images), all_costs(params, images)
    reached = jnp.mean(jnp.sum(jax.nn.softmax(logits) * costs, axis=-1)) - BETA * mean_entropy(logits)
    bound = -BETA * jnp.mean(jax.nn.logsumexp(-costs / BETA, axis=-1))
    print(f"loss {reached:.4f}, the least that these prototypes allow {bound:.4f} ({reached / bound - 1:+.1%})")
    routed = jnp.mean(jnp.take_along_axis(costs, logits.argmax(-1)[:, None], 1))
    best = KMeans(ROUTES, n_init=10, random_state=0).fit(np.asarray(images)).inertia_ / len(images)
    print(f"cost of the router's choice {routed:.4f}, of k-means {best:.4f} ({routed / best - 1:+.1%})")
    table = np.stack([gradient_errors(start, images[:8], jax.random.key(2), tau) for tau in TEMPERATURES])
    print(f"score function's mean gradient: error {table[0, 2, 0] / table[0, 2, 1]:.2f} of chance (theory: 1)")
    plot(table)


if __name__ == "__main__":
    main()
