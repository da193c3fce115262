"""Models of ``hp-muon bench trainer``, and who trains them."""

import re

from hp_muon_plugin.config.choices import OuterMode, PlatformName, Precision
from hp_muon_plugin.config.data_parallel import DataParallel, DpOptions, HpFsdp, MegatronFsdp, TorchFsdp2
from hp_muon_plugin.config.optimizer import AdamW, HpMuon
from hp_muon_plugin.config.trainer import LrSchedule, Model, MoE, Platform, Run, Topology, Train
from hp_muon_plugin.errors import ConfigError

OURS = "hp_fsdp"
REFERENCE = "megatron_ddp"
"""What losses are compared with. It shards nothing, and has no part in the ratio."""
ALONE = "compute alone"
NAMED = ("dense256x4", "moe128x4")
_CASE = re.compile(r"(dense|moe)(\d+)x(\d+)")
_VOCABULARY, _LENGTH, _EXPERTS = 512, 128, 8


def model_of(text: str, option: str) -> Model:
    """The model of a case.

    Args:
        text: Such as ``dense256x4``: kind, width, layers. ``moe`` has 8 experts in every layer, 2 for each token.
        option: Named in errors.

    Returns:
        Its options.

    Raises:
        ConfigError: If the text says something else.
    """
    found = _CASE.fullmatch(text)
    if found is None or int(found[2]) % 32 or not int(found[2]) or not int(found[3]):
        raise ConfigError(option, text, "is no case", "write for example dense256x4; the width is a multiple of 32")
    width = int(found[2])
    return Model(
        name=text,
        num_layers=int(found[3]),
        hidden_size=width,
        num_attention_heads=width // 32,
        num_query_groups=width // 32,
        ffn_hidden_size=3 * width,
        seq_length=_LENGTH,
        vocab_multiple=_VOCABULARY,
        moe=MoE(num_experts=_EXPERTS, top_k=2, ffn_hidden_size=width) if found[1] == "moe" else None,
    )


def train_of(model: Model, optimizer: str, precision: str, world_size: int) -> Train:
    """Options of a run without its wrapper.

    Args:
        model: The model.
        optimizer: ``adamw`` or ``hp_muon``.
        precision: ``fp32`` or ``bf16``.
        world_size: Ranks, all data parallel.

    Returns:
        One sample on each rank and step.
    """
    return Train(
        optimizer=AdamW() if optimizer == "adamw" else HpMuon(),
        model=model,
        topology=Topology(),
        platform=Platform(name=PlatformName.auto, precision=Precision(precision)),
        lr_schedule=LrSchedule(warmup_steps=2),
        run=Run(steps=1_000_000, micro_batch_size=1, global_batch_size=world_size, dir="unused"),
    )


def peers(config: Train) -> dict[str, DpOptions]:
    """Wrappers by name, ours first.

    Args:
        config: Options of the run.

    Returns:
        What can be built with its optimizer.
    """
    found: dict[str, DpOptions] = {OURS: HpFsdp(), REFERENCE: DataParallel(), "torch_fsdp2": TorchFsdp2()}
    ranks = config.run.global_batch_size
    if ranks > 2 and ranks % 2 == 0:
        found["hp_hsdp"] = HpFsdp(replicas=2, outer=OuterMode.shard)
    if isinstance(config.optimizer, AdamW):
        found["megatron_fsdp"] = MegatronFsdp()
    return found
