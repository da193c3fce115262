"""``python -m hp_muon_plugin.run``: an unmodified Megatron-LM script trains with the plugin."""

import os
import runpy
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hp_muon_plugin.cli.hydra_app import complain, say
from hp_muon_plugin.cli.script_adaptor import registering
from hp_muon_plugin.cli.script_args import Request, parse, parser
from hp_muon_plugin.cli.script_config import composed_choice
from hp_muon_plugin.cli.script_files import check_data, check_load, check_save
from hp_muon_plugin.cli.script_line import added_variables, optimizer_of, script_line
from hp_muon_plugin.cli.script_module import find_module
from hp_muon_plugin.cli.script_ranks import check_ranks
from hp_muon_plugin.config.choices import PlatformName
from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.config.script import OPTIMIZER, Choice
from hp_muon_plugin.errors import ConfigError, HookError, HpMuonError
from hp_muon_plugin.platform.collecting import without_collecting
from hp_muon_plugin.train.environment import check_environment, is_rank, speaks
from hp_muon_plugin.train.worker import FAILURE_EXIT, USAGE_EXIT, is_mistake

if TYPE_CHECKING:
    from hp_muon_plugin.megatron.report import Report

_OTHER_RANKS_WAIT_S = 5.0
"""How long rank 0 has to tell an error that ranks may find alike."""


def run(arguments: Sequence[str]) -> int:
    """Check the options, install the plugin, and run the script.

    Args:
        arguments: After ``-m hp_muon_plugin.run``.

    Returns:
        Exit code: 2 for a user's mistake, 1 where the plugin was not used or a step failed, else 0. Whatever else the
        script raises passes through, ``SystemExit`` included.
    """
    try:
        request = parse(arguments)
        if request.wants_help:
            print(parser().format_help())
            if request.script is None:
                return 0
        choice = composed_choice(_with_script_optimizer(request))
        platform = _chosen_platform(choice)
        line, added = script_line(request.arguments, choice, platform)
        _check_script(request)
        if is_rank():
            check_environment(os.environ)
        num_ranks = int(os.environ.get("WORLD_SIZE", "1")) if is_rank() else 1
        check_ranks(request.arguments, choice, num_ranks, is_alone=not is_rank())
        if speaks():
            check_data(request.arguments)
            check_save(request.arguments)
            check_load(request.arguments, choice)
    except HpMuonError as error:
        complain(str(error))
        return USAGE_EXIT
    try:
        _run(request, choice, platform, line, added)
    except HpMuonError as error:
        _tell(str(error))
        return USAGE_EXIT if is_mistake(error) else FAILURE_EXIT
    return 0


def _with_script_optimizer(request: Request) -> Request:
    """``--optimizer adam`` among the script's arguments chooses, where no option of ours does."""
    name = optimizer_of(request.arguments)
    if name in (None, HpMuon.name) or request.config is not None:
        return request
    if any(word.lstrip("+").startswith((f"{OPTIMIZER}=", f"{OPTIMIZER}.")) for word in request.overrides):
        return request
    if any(path.startswith(f"{OPTIMIZER}.") for path in request.values):
        return request
    return replace(request, overrides=(f"{OPTIMIZER}=adamw", *request.overrides))


def _chosen_platform(choice: Choice) -> PlatformName:
    with without_collecting():
        from hp_muon_plugin.platform.base import choose

        return choose(choice.platform).name


def _check_script(request: Request) -> None:
    assert request.script is not None
    if request.is_module:
        find_module(request.script)
    elif not Path(request.script).is_file():
        raise ConfigError("SCRIPT", request.script, "there is no such file", "give the path of the training script")


def _run(request: Request, choice: Choice, platform: PlatformName, line: list[str], added: list[str]) -> None:
    assert request.script is not None
    if not is_rank():
        os.environ.update(_alone())
    variables = added_variables(line, platform, os.environ)
    os.environ.update(variables)
    with without_collecting():
        from hp_muon_plugin.megatron.installation import Report
        from hp_muon_plugin.platform.base import choose

    reports: list[Report] = []

    def register() -> None:
        with without_collecting():
            reports.append(_register(choice, platform))
        if speaks():
            told = [f"\n  added to the script's arguments: {' '.join(added)}"] if added else []
            told += [f"\n  set in the environment: {name}={value}" for name, value in variables.items()]
            say(f"{reports[0]}{''.join(told)}")

    before = sys.argv, list(sys.path)
    sys.argv = [request.script, *line]  # MindSpeed reads it while it is imported
    try:
        with without_collecting():
            choose(platform).prepare(int(os.environ.get("LOCAL_RANK", "0")))
        with registering(request, platform, register):
            _execute(request)
    except SystemExit as ended:  # many scripts end with sys.exit(main())
        if ended.code in (None, 0) and not request.wants_help:
            _check_used(reports, choice)
        raise
    finally:
        sys.argv, sys.path[:] = before
    _check_used(reports, choice)


def _execute(request: Request) -> None:
    assert request.script is not None
    try:
        if request.is_module:
            runpy.run_module(request.script, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(request.script).resolve().parent))
            runpy.run_path(request.script, run_name="__main__")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("megatron."):
            raise
        raise _other_megatron(str(error.name), request.script) from error


def _register(choice: Choice, platform: PlatformName) -> "Report":
    from hp_muon_plugin.megatron.installation import Select, install, warn_no_more

    _repair(platform)
    report = install(
        choice.optimizer,
        select=Select.by_name if choice.optimizer is None else Select.always,
        data_parallel=choice.data_parallel,
        hooks=choice.hooks,
        strict=choice.strict,
        allow_untested=choice.allow_untested,
    )
    warn_no_more()
    return report


def _other_megatron(module: str, script: str) -> ConfigError:
    """Scripts of Megatron-LM need its trainer, which most wheels of megatron-core have not, and one version of it."""
    from hp_muon_plugin.megatron.versions import core_version

    why = f"imports {module}, which the installed megatron-core {core_version()} does not have"
    fix = "put the Megatron-LM that the script is of on PYTHONPATH, or install the megatron-core that it is for"
    return ConfigError("SCRIPT", script, why, f"{fix} (recipes/pretrain: 0.19, which needs Python 3.12)")


def _repair(platform: PlatformName) -> None:
    from hp_muon_plugin.megatron.cpu_fixes import apply_cpu_fixes
    from hp_muon_plugin.megatron.local_fixes import apply_local_fixes
    from hp_muon_plugin.megatron.training_fixes import apply_training_fixes

    if platform is PlatformName.cpu:
        apply_cpu_fixes()
    else:
        apply_local_fixes()
    apply_training_fixes()


def _check_used(reports: Sequence["Report"], choice: Choice) -> None:
    if not choice.is_ours:
        return
    try:
        if not reports:
            raise HookError(
                "the plugin was not registered: the script imported neither MindSpeed's adaptor nor Megatron\n"
                "  fix: give the script that trains"
            )
        reports[0].assert_used()
    except HookError as error:
        if choice.strict:
            raise
        say(f"warning: {error}")


def _alone() -> dict[str, str]:
    """The environment of a job of one rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _tell(message: str) -> None:
    """Print an error of the run: rank 0 first, others if they are still there, for they may have met another."""
    if not speaks():
        time.sleep(_OTHER_RANKS_WAIT_S)
        message = f"rank {os.environ.get('RANK')}: {message}"
    say(message)
