"""Distributed Muon and HyperParallel-FSDP/HSDP for Megatron-style trainers.

Importing this package imports no torch and changes nothing. Start at one of:

* ``hp-muon train`` or ``hp-muon doctor`` on the command line;
* ``optimizer=hp_muon`` in any Hydra application;
* :func:`hp_muon_plugin.megatron.install` in a Megatron pretraining script;
* :func:`hp_muon_plugin.muon.build_optimizer` with plain PyTorch.
"""

__version__ = "0.1.0"
