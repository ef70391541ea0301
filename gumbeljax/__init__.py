"""Draw tokens from language models in JAX, exactly and fast, without writing the logits to memory."""

from gumbeljax import _compat

_compat.check_jax_version()

from gumbeljax._call import choose_implementation  # noqa: E402
from gumbeljax._tuning import TunedShape, Tuning, load_tuning, save_tuning  # noqa: E402
from gumbeljax.autotuning import autotune  # noqa: E402
from gumbeljax.laws import TopLogProbs, kept_tokens, processed_log_probs, top_log_probs  # noqa: E402
from gumbeljax.processing import Processors, TokenCounts, count_tokens, options_from_config  # noqa: E402
from gumbeljax.quantized import QuantizedHead, quantize_head  # noqa: E402
from gumbeljax.relaxation import gumbel_softmax  # noqa: E402
from gumbeljax.sampling import Draw, greedy, sample, sample_logits, sample_with_log_probs  # noqa: E402
from gumbeljax.scoring import log_prob  # noqa: E402
from gumbeljax.sharding import sample_sharded  # noqa: E402

__version__ = "0.1.0"

__all__ = [
    "Draw",
    "Processors",
    "QuantizedHead",
    "TokenCounts",
    "TopLogProbs",
    "TunedShape",
    "Tuning",
    "autotune",
    "choose_implementation",
    "count_tokens",
    "greedy",
    "gumbel_softmax",
    "kept_tokens",
    "load_tuning",
    "log_prob",
    "options_from_config",
    "processed_log_probs",
    "quantize_head",
    "sample",
    "sample_logits",
    "sample_sharded",
    "sample_with_log_probs",
    "save_tuning",
    "top_log_probs",
]
