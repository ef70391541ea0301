"""The commands behind ``gumbeljax``, one file each."""
