"""Sequential Monte Carlo: weights in, ancestors out."""

from gumbeljax.smc.ess import ess, log_ess, log_mean_weight, normalize
from gumbeljax.smc.resampling import multinomial, residual, stratified, systematic

__all__ = ["ess", "log_ess", "log_mean_weight", "multinomial", "normalize", "residual", "stratified", "systematic"]
