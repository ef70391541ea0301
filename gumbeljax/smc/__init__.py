"""Sequential Monte Carlo: particles moved, weighed and resampled, and the pieces of it."""

from gumbeljax.smc.core import Info, State, choose, gather, init, log_evidence, resample, step
from gumbeljax.smc.ess import ess, log_ess, log_mean_weight, normalize
from gumbeljax.smc.resampling import multinomial, residual, stratified, systematic
from gumbeljax.smc.weights import Kept, bonus_temperature, first_token_keys, kept_tokens, log_weight

__all__ = [
    "Info", "Kept", "State", "bonus_temperature", "choose", "ess", "first_token_keys", "gather", "init", "kept_tokens",
    "log_ess", "log_evidence", "log_mean_weight", "log_weight", "multinomial", "normalize", "resample", "residual", "step",
    "stratified", "systematic",
]  # fmt: skip
