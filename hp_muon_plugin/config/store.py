"""Registration of the typed schemas with Hydra's ConfigStore.

The YAML files under ``conf/`` are what users choose; each begins with its schema from here, so that
a misspelt key or a wrong type is refused by Hydra with the name of the option.
"""

from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from omegaconf import OmegaConf

from hp_muon_plugin.config.data_parallel import DataParallel, HpFsdp, MegatronFsdp, TorchFsdp2
from hp_muon_plugin.config.optimizer import AdamW, HpMuon
from hp_muon_plugin.config.script import Script
from hp_muon_plugin.config.trainer import Data, Logger, Model, Platform, Topology, Train

SWEEP_FOLDER = "hp_muon.sweep_folder"
"""The resolver through which ``conf/hp_muon_train.yaml`` names the folder of a sweep."""

_SCHEMAS: tuple[tuple[str | None, str, type], ...] = (
    ("optimizer", "hp_muon_schema", HpMuon),
    ("optimizer", "hp_muon_adamw_schema", AdamW),
    ("dp", "hp_muon_dp_schema", DataParallel),
    ("dp", "hp_muon_fsdp_schema", HpFsdp),
    ("dp", "hp_muon_torch_fsdp2_schema", TorchFsdp2),
    ("dp", "hp_muon_megatron_fsdp_schema", MegatronFsdp),
    ("model", "hp_muon_model_schema", Model),
    ("data", "hp_muon_data_schema", Data),
    ("topology", "hp_muon_topology_schema", Topology),
    ("logger", "hp_muon_logger_schema", Logger),
    ("platform", "hp_muon_platform_schema", Platform),
    (None, "hp_muon_train_schema", Train),
    (None, "hp_muon_run_schema", Script),
)


def register_schemas() -> None:
    """Put every schema into the ConfigStore, and register our resolver. Calling it again changes nothing."""
    if not OmegaConf.has_resolver(SWEEP_FOLDER):
        OmegaConf.register_new_resolver(SWEEP_FOLDER, same_folder)
    store = ConfigStore.instance()
    for group, name, node in _SCHEMAS:
        if not _holds(store, f"{name}.yaml" if group is None else f"{group}/{name}.yaml"):
            store.store(group=group, name=name, node=node, provider="hp_muon_plugin")


def same_folder(folder: str) -> str:
    """What the resolver gives where nobody watches the folder.

    Args:
        folder: As the configuration names it.

    Returns:
        The same.
    """
    return folder


def _holds(store: ConfigStore, path: str) -> bool:
    """Hydra 1.4 warns where a name is stored again, and 1.5 refuses it."""
    return store.get_type(path) is ObjectType.CONFIG  # load() copies it
