"""Kernels of gumbeljax: arrays and ints in, arrays out. Imports jax only; `gumbeljax` is the public face."""
