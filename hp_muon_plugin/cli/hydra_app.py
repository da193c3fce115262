"""Running one of our commands as a Hydra application, with our error messages and exit codes."""

import os
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from hp_muon_plugin.cli.explain import explain
from hp_muon_plugin.config.store import register_schemas
from hp_muon_plugin.errors import HpMuonError
from hp_muon_plugin.megatron.versions import parse_version

USAGE_EXIT = 2


def run_hydra(task: Callable[[DictConfig], int], config_name: str, overrides: list[str]) -> int:
    """Compose a configuration from our tree and call ``task`` with it.

    Args:
        task: Gets the composed configuration, returns an exit code.
        config_name: Primary config in ``conf/``.
        overrides: Command-line arguments after the command, Hydra's own flags included.

    Returns:
        Exit code: 2 for a user's mistake, else what ``task`` returned (its last job's, with ``-m``).
    """
    register_schemas()
    codes: list[int] = []

    def job(config: DictConfig) -> None:
        try:
            codes.append(task(config))
        except HpMuonError as error:
            complain(str(error))
            codes.append(USAGE_EXIT)

    job.__module__, job.__qualname__ = __name__, "job"
    options: dict[str, Any] = {"config_path": "pkg://hp_muon_plugin.conf", "config_name": config_name}
    if parse_version(metadata.version("hydra-core")) < parse_version("1.4"):
        options["version_base"] = "1.3"  # 1.4 warns where it is given, 1.3 where it is not
    before = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = ["hp-muon", *overrides]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let errors through to us instead of printing them
    try:
        hydra.main(**options)(job)()
    except (HydraException, OmegaConfBaseException) as error:
        complain(explain(error, overrides))
        return USAGE_EXIT
    finally:
        sys.argv = before[0]
        _restore("HYDRA_FULL_ERROR", before[1])
    return max(codes, default=0)


def complain(message: str) -> None:
    """Print an error, once for the job: under torchrun only rank 0 speaks.

    Args:
        message: The message.
    """
    if os.environ.get("RANK", "0") == "0":
        print(f"hp-muon: {message}", file=sys.stderr, flush=True)


def _restore(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
