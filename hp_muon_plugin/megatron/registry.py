"""hp_muon in megatron-core's own table of optimizers (0.18 and later): a convenience, under DistributedDataParallel.

Megatron's factory then does what it does for its own Muon: it sends vectors, embeddings and routers to its AdamW, makes
float32 masters, measures norms and clips. What is ours is the update of matrices. An option of ours that Megatron
decides there is refused where the two differ; the hook ``optimizer`` honours it.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.optimizer import emerging_optimizers as table
from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate

from hp_muon_plugin.config.choices import ClipMode, MissingGrad, NonFinite
from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.errors import ConfigError, HookError, raise_all
from hp_muon_plugin.layout.cuts import Cuts
from hp_muon_plugin.layout.spec import ParamSpec
from hp_muon_plugin.megatron.build import muon_routes
from hp_muon_plugin.megatron.groups import MegatronGroups, megatron_groups
from hp_muon_plugin.megatron.hooks import ENTRY_CLASS, OPTIMIZER
from hp_muon_plugin.megatron.options import resolve_options
from hp_muon_plugin.megatron.refusals import (
    refuse_own_qk_clip,
    refuse_split_latent,
    refuse_unreduced,
    refuse_wrappers,
)
from hp_muon_plugin.megatron.report import Report
from hp_muon_plugin.megatron.sharded_model import HpFsdpModel
from hp_muon_plugin.megatron.specs import chunk_specs, role_of
from hp_muon_plugin.muon.distributed.items import ShardedParam
from hp_muon_plugin.muon.distributed.optimizer import ShardedMuonOptimizer
from hp_muon_plugin.muon.distributed.share import Share
from hp_muon_plugin.muon.gradients import listed
from hp_muon_plugin.muon.routing import Algorithm, is_adamw_role


class RegisteredMuon(ShardedMuonOptimizer):
    """Muon over the groups that Megatron's factory hands to an entry of its table.

    Megatron has reduced, copied and clipped the gradients when it calls :meth:`step`, and may have put float32
    masters into the groups since construction.

    Args:
        groups: Megatron's groups of matrices, dense ones or experts'.
        specs: Spec of every parameter of the model.
        options: Options.
        places: Megatron's groups of ranks.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        *,
        specs: Mapping[torch.nn.Parameter, ParamSpec],
        options: HpMuon,
        places: MegatronGroups,
    ) -> None:
        given = [param for group in groups for param in group["params"]]
        shares = []
        for axis, is_expert in ((places.dp, False), (places.expert_dp, True)):
            held = tuple(param for param in given if specs[param].is_expert is is_expert)
            if axis.size > 1 and held:
                items = tuple(ShardedParam(specs[p], Cuts.of((0, specs[p].local_numel))) for p in held)
                shares.append(Share(axis, items, held, is_replicated=True))
        super().__init__(
            [dict(group, algorithm=str(Algorithm.muon)) for group in groups],
            {param: specs[param] for param in given},
            options,
            axes=places.axes,
            shares=shares,
            device=next((param.device for param in specs), torch.device("cpu")),
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update from ``.grad`` as Megatron left it.

        Args:
            closure: None; Megatron passes nothing.

        Returns:
            None.
        """
        assert closure is None
        now = [param for group in self.param_groups for param in group["params"]]
        self.exchange({old: new for old, new in zip(self.specs, now, strict=True) if old is not new})
        self.update()


def registry_entry(report: Report) -> Any:
    """The value for ``hp_muon`` in Megatron's table.

    Args:
        report: The installation.

    Returns:
        An ``EmergingOptimizerEntry``.
    """
    to_adamw = ParamKey(with_name_predicate=ParamWithNamePredicate("hp_muon_leaves_to_adamw", _is_left_to_adamw))
    return getattr(table, ENTRY_CLASS)(
        optimizer_cls=RegisteredMuon,
        init_state_fn=lambda optimizer, config=None: optimizer.init_state(),
        config_to_kwargs=partial(_arguments, report),
        default_param_overrides={to_adamw: {"optimizer": "adam"}},
    )


def _is_left_to_adamw(param: torch.nn.Parameter, name: str) -> bool:
    """Whether the role says AdamW, as far as name and shape tell it; compared with the routes afterwards."""
    return is_adamw_role(role_of(name, param)) or param.dim() < 2 or min(param.shape[-2:]) == 1


def _arguments(report: Report, config: Any, chunks: Sequence[torch.nn.Module], pg_collection: Any) -> dict[str, Any]:
    """What :class:`RegisteredMuon` takes besides groups. Collective: every rank builds the same optimizers."""
    if config.optimizer != OPTIMIZER:
        why = "is Megatron's way to ask for its layer-wise optimizer, which gives ranks whole layers of its own Muon"
        raise ConfigError("optimizer", config.optimizer, why, f"choose {OPTIMIZER}, or dp=hp_fsdp for shards")
    if any(isinstance(chunk, HpFsdpModel) for chunk in chunks):
        raise HookError(
            "the model is sharded by HP-FSDP, and Megatron's own factory would take shards for whole weights\n"
            "  fix: install the hook 'optimizer' as well (leave HP_MUON_HOOKS unset), and let the trainer import "
            "get_megatron_optimizer after install()"
        )
    refuse_wrappers(chunks)
    options = resolve_options(report.given, config)
    raise_all(_decided_by_megatron(options, config))
    refuse_own_qk_clip(chunks)
    refuse_split_latent(chunks)
    places = megatron_groups(pg_collection)
    specs = chunk_specs(chunks, options, places)
    refuse_unreduced(specs)
    routes = dict(zip(specs, muon_routes(options, specs), strict=True))
    _check_division(chunks, {param: route.algorithm for param, route in routes.items()})
    report.note_registered(chunks)
    return {"specs": specs, "options": options, "places": places}


def _decided_by_megatron(options: HpMuon, config: Any) -> list[ConfigError]:
    """Options that Megatron's factory and its AdamW decide by themselves, where ours say something else."""
    adamw = options.adamw
    pairs: list[tuple[str, Any, Any]] = [
        ("lr", options.lr, config.lr),
        ("weight_decay", options.weight_decay, config.weight_decay),
        ("clip_grad", options.clip_grad, config.clip_grad),
        ("clip_mode", options.clip_mode, ClipMode.all),
        ("non_finite", options.non_finite, NonFinite.skip),
        ("missing_grad", options.missing_grad, MissingGrad.leave),
        ("qk_clip", options.qk_clip, None),
        ("muon_params", list(options.muon_params), []),
        ("adamw_params", list(options.adamw_params), []),
        ("adamw.lr", _given(adamw.lr, config.lr), config.lr),
        ("adamw.betas", list(adamw.betas), [config.adam_beta1, config.adam_beta2]),
        ("adamw.eps", adamw.eps, config.adam_eps),
        ("adamw.weight_decay", _given(adamw.weight_decay, config.weight_decay), config.weight_decay),
    ]
    return [
        ConfigError(
            f"optimizer.{name}",
            ours,
            f"Megatron's own factory builds this optimizer, and does it its way ({theirs})",
            "leave it out and set Megatron's option, or install the hook 'optimizer' (leave HP_MUON_HOOKS unset)",
        )
        for name, ours, theirs in pairs
        if ours != theirs
    ]


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


def _check_division(chunks: Sequence[torch.nn.Module], routes: Mapping[torch.nn.Parameter, Algorithm]) -> None:
    wrong = [
        name
        for chunk in chunks
        for name, param in chunk.named_parameters()
        if param.requires_grad and _is_left_to_adamw(param, name) is not (routes[param] is Algorithm.adamw)
    ]
    if wrong:
        raise ConfigError(
            "optimizer",
            OPTIMIZER,
            f"Megatron's own factory would not divide {listed(wrong)} between Muon and AdamW as hp_muon does",
            "install the hook 'optimizer' (leave HP_MUON_HOOKS unset)",
        )
