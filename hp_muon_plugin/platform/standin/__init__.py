"""A stand-in for ``torch.cuda`` on machines without an accelerator.

megatron-core calls ``torch.cuda.*``, writes ``device='cuda'`` and ``.cuda()``, and compares
``tensor.type()`` with names of CUDA tensors. With the stand-in active all of that means the CPU,
so that real, unmodified megatron-core trains over gloo. It is explicit and reversible, and refuses
to start where an accelerator is present.
"""

from hp_muon_plugin.platform.standin.switch import activate, deactivate, is_active, replaced

__all__ = ["activate", "deactivate", "is_active", "replaced"]
