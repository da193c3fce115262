"""The trainer: data, loop, metrics, progress."""
