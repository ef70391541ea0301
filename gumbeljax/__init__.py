"""Draw tokens from language models in JAX, exactly and fast, without writing the logits to memory."""

from gumbeljax import _compat

_compat.check_jax_version()

from gumbeljax._implementation import choose_implementation  # noqa: E402
from gumbeljax.relaxation import gumbel_softmax  # noqa: E402
from gumbeljax.sampling import Draw, greedy, sample, sample_logits, sample_with_log_probs  # noqa: E402
from gumbeljax.scoring import log_prob  # noqa: E402

__version__ = "0.1.0"

__all__ = [
    "Draw",
    "choose_implementation",
    "greedy",
    "gumbel_softmax",
    "log_prob",
    "sample",
    "sample_logits",
    "sample_with_log_probs",
]
