"""Speculative verification: drafted tokens in, tokens of the target's law out."""

from gumbeljax.speculative.acceptance import acceptance, chains_acceptance, coupled_acceptance
from gumbeljax.speculative.law import Law, position_counts, position_keys
from gumbeljax.speculative.verify import ChainsVerification, Verification, verify, verify_chains, verify_coupled

__all__ = ["ChainsVerification", "Law", "Verification", "acceptance", "chains_acceptance", "coupled_acceptance",
           "position_counts", "position_keys", "verify", "verify_chains", "verify_coupled"]
