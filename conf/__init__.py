"""The Hydra configs. Hydra's ``pkg://`` source needs this file."""
