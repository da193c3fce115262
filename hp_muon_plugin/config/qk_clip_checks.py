"""Whether attention logits can be clipped by scaling the projections of queries and keys."""

from collections.abc import Iterator

from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.config.trainer import Train
from hp_muon_plugin.errors import ConfigError


def qk_clip_errors(config: Train) -> Iterator[ConfigError]:
    """Check what ``optimizer.qk_clip`` needs of the model.

    Args:
        config: Options, every number in its range.

    Yields:
        One error for each thing that is wrong.
    """
    options, model = config.optimizer, config.model
    if not isinstance(options, HpMuon) or options.qk_clip is None or model.mla is not None:
        return
    if model.qk_layernorm:
        yield ConfigError(
            "optimizer.qk_clip",
            options.qk_clip,
            "model.qk_layernorm=true normalises queries and keys after their projection, so that scaling the "
            "projection changes no logit",
            "set one of them: optimizer.qk_clip=null, or model.qk_layernorm=false",
        )
    if model.num_query_groups % config.topology.tp:
        yield ConfigError(
            "optimizer.qk_clip",
            options.qk_clip,
            f"model.num_query_groups={model.num_query_groups} is not divisible by topology.tp={config.topology.tp}, so "
            "that heads are cut",
            "set optimizer.qk_clip=null, or take fewer tensor-parallel ranks",
        )
