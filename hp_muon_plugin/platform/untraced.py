"""Functions that ``torch.compile`` runs as they are, with a break in its graph before and after."""

from torch._compile import _disable_dynamo

untraced = _disable_dynamo
"""Decorator, as ``torch.compiler.disable``, which would import the compiler when a module is imported."""
