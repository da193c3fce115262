"""Checkpoints: our own, and conversion between the formats of Megatron, PyTorch, HyperParallel and Hugging Face."""
