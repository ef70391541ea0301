"""Sequential Monte Carlo: particles moved, weighed and resampled, and the pieces of it."""

from gumbeljax.smc.core import Info, State, choose, gather, init, log_evidence, resample, step
from gumbeljax.smc.ess import ess, log_ess, log_mean_weight, normalize
from gumbeljax.smc.resampling import multinomial, residual, stratified, systematic
from gumbeljax.smc.weights import Cut, bonus_temperature, cut_tokens, first_token_keys, log_weight

__all__ = [
    "Cut",
    "Info",
    "State",
    "bonus_temperature",
    "choose",
    "cut_tokens",
    "ess",
    "first_token_keys",
    "gather",
    "init",
    "log_ess",
    "log_evidence",
    "log_mean_weight",
    "log_weight",
    "multinomial",
    "normalize",
    "resample",
    "residual",
    "step",
    "stratified",
    "systematic",
]  # fmt: skip
