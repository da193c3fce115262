"""What can be seen before a rank starts, besides options that contradict each other.

Everything here needs neither torch nor a process group, so a mistake is one message of the
launcher, and not a traceback of each rank.
"""

import os
from pathlib import Path

import numpy as np

from hp_muon_plugin.config.blend import Blend, read_blend
from hp_muon_plugin.config.choices import DataKind
from hp_muon_plugin.config.data_checks import is_named, missing_files
from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.config.trainer import Train
from hp_muon_plugin.errors import ConfigError, HookError
from hp_muon_plugin.megatron.hooks import HOOKS, HookKind
from hp_muon_plugin.megatron.lane_checks import check_lane
from hp_muon_plugin.megatron.versions import CoreVersion, core_version
from hp_muon_plugin.models.gpt_specs import gpt_specs, padded_vocab_size
from hp_muon_plugin.muon.routing import Algorithm, route_parameters
from hp_muon_plugin.muon.rule_file import load_table
from hp_muon_plugin.train.environment import chosen_start
from hp_muon_plugin.train.probe import probe_folder
from hp_muon_plugin.train.text import build_pydoc_dataset, pydoc_tokens, unwritable_cache, vocabulary_size
from hp_muon_plugin.train.token_checks import check_parts, open_files

HOOKS_VARIABLE = "HP_MUON_HOOKS"


def check_plan(config: Train) -> None:
    """Check what a dry run needs: the optimizer's table and patterns, and the datasets that are there.

    Args:
        config: Options that agree with each other.

    Raises:
        ConfigError: If a pattern fits no parameter, or a file or a part of the text cannot be used.
        DataError: If the dataset is damaged.
    """
    if isinstance(config.optimizer, HpMuon):
        _check_table(config.optimizer)
        _check_patterns(config, config.optimizer)
    if config.data.kind is DataKind.megatron:
        _check_datasets(config)
        return
    lengths = np.array([len(document) for document in pydoc_tokens()])
    check_parts(lengths, config.data.split, config.model.seq_length)


def check_machine(config: Train) -> None:
    """Check what only a real run needs: megatron-core, variables, and a folder for the data.

    The built-in text is written here.

    Args:
        config: Options that :func:`check_plan` accepts.

    Raises:
        ConfigError: If this megatron-core cannot train it, ``HP_MUON_START`` is no way to start ranks, or a folder
            cannot be written to.
        HookError: If megatron-core is missing, or ``HP_MUON_HOOKS`` leaves out what is needed.
    """
    check_lane(config)
    chosen_start(os.environ)
    if isinstance(config.optimizer, HpMuon):
        check_hooks_variable(os.environ.get(HOOKS_VARIABLE), core_version())
    _check_writable(config.data.cache_dir)
    if config.data.kind is DataKind.pydoc:
        build_pydoc_dataset(config.data.cache_dir)


def check_hooks_variable(value: str | None, version: CoreVersion) -> None:
    """Check that ``HP_MUON_HOOKS`` names hooks, and the ones without which nothing can train.

    Args:
        value: Its value; None or nothing installs all hooks.
        version: The installed megatron-core.

    Raises:
        HookError: Naming the variable.
    """
    if not value:
        return
    names = [name.strip() for name in value.split(",")]
    known = [hook.name for hook in HOOKS]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise HookError(
            f"{HOOKS_VARIABLE}={value}: there is no hook {', '.join(map(repr, unknown))}\n"
            f"  fix: unset {HOOKS_VARIABLE}, or choose among {', '.join(known)}"
        )
    factories = [hook.name for hook in HOOKS if hook.kind is HookKind.factory and hook.applies(version)]
    if factories[0] not in names:
        raise HookError(
            f"{HOOKS_VARIABLE}={value}: without the hook {factories[0]} Megatron does not know optimizer=hp_muon\n"
            f"  fix: unset {HOOKS_VARIABLE}, or add {factories[0]} to it"
        )


def _check_datasets(config: Train) -> None:
    """Those that are not there :func:`~hp_muon_plugin.config.checks.check_train` has refused, but for a plan."""
    if not is_named(config.data.path):
        return
    blend = read_blend(config.data.path)
    there = tuple(prefix for prefix in blend.names if not missing_files(prefix))
    vocab_size = vocabulary_size(config.data)
    open_files(Blend(there), config.data.split, seq_length=config.model.seq_length, vocab_size=vocab_size)


def _check_table(options: HpMuon) -> None:
    if options.ns_table is None:
        return
    try:
        load_table(Path(options.ns_table))
    except OSError as error:  # a folder, or without permission; what else is wrong load_table itself says
        raise ConfigError(
            "optimizer.ns_table",
            options.ns_table,
            f"cannot be read ({error.strerror})",
            "let this user read it, or write one with `hp-muon bench newton-schulz --calibrate`",
        ) from None


def _check_patterns(config: Train, options: HpMuon) -> None:
    """Route the whole model from options alone. Grouped experts have other names, which ranks alone know."""
    if config.model.moe is not None and config.model.moe.grouped_gemm:
        return
    vocabulary = padded_vocab_size(vocabulary_size(config.data), config.model, config.topology)
    specs = gpt_specs(config.model, config.topology, vocabulary, options)
    routes = route_parameters(specs, muon_params=options.muon_params, adamw_params=options.adamw_params)
    if not any(route.algorithm is Algorithm.muon for route in routes):
        raise ConfigError(
            "optimizer.adamw_params",
            f"[{','.join(options.adamw_params)}]",
            "leaves no parameter for Muon",
            "take optimizer=adamw, or narrow the patterns",
        )


def _check_writable(folder: str) -> None:
    """Megatron keeps shuffled indices there, and rank 0 alone would find out that it cannot."""
    try:
        probe_folder(Path(folder))
    except OSError as error:
        raise unwritable_cache(folder, error) from None
