"""Failure cases of real samplers, from public bug reports, by area. Letters and numbers are those of the case list."""
