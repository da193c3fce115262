"""What ``run.dry=true`` prints: ranks, batches, routing, and the Muon step of the busiest rank."""

from collections import Counter

from hp_muon_plugin.cli.figures import gflop, mib
from hp_muon_plugin.cli.muon_text import muon_lines
from hp_muon_plugin.cli.replica_text import replica_lines
from hp_muon_plugin.cli.shard_text import crossing_lines, shard_lines, stage_plans
from hp_muon_plugin.config.blend import read_blend
from hp_muon_plugin.config.checks import data_parallel_size
from hp_muon_plugin.config.choices import DataKind
from hp_muon_plugin.config.data_checks import is_named, missing_files
from hp_muon_plugin.config.data_parallel import DataParallel, HpFsdp, TorchFsdp2
from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.config.trainer import Data, Train
from hp_muon_plugin.layout.spec import ParamSpec
from hp_muon_plugin.megatron.lane_checks import lane_errors
from hp_muon_plugin.models.gpt_specs import gpt_specs, padded_vocab_size, stage_specs
from hp_muon_plugin.models.muon_shares import device_of
from hp_muon_plugin.models.shard_plan import ShardPlan
from hp_muon_plugin.muon.pieces import Way
from hp_muon_plugin.muon.plan import MuonPlan, build_plan
from hp_muon_plugin.muon.routing import Algorithm, route_parameters
from hp_muon_plugin.muon.stage import Stage
from hp_muon_plugin.muon.table import format_table, table_rows
from hp_muon_plugin.train.text import vocabulary_size


def plan_text(config: Train, world_size: int) -> str:
    """The plan of a run, computed without a device, torch.distributed or a model.

    Args:
        config: Checked options.
        world_size: Ranks.

    Returns:
        Text without a final newline.
    """
    topology, run = config.topology, config.run
    dp = data_parallel_size(topology, world_size)
    edp = world_size // (topology.ep * topology.etp * topology.pp)
    micro = run.global_batch_size // (run.micro_batch_size * dp)
    options = _muon_options(config)
    vocab = vocabulary_size(config.data)
    padded = padded_vocab_size(vocab, config.model, topology)
    specs = gpt_specs(config.model, topology, padded, options)
    tokens = run.global_batch_size * config.model.seq_length
    lines = [
        f"ranks      {world_size} = tp {topology.tp} x pp {topology.pp} x dp {dp}; "
        f"experts: etp {topology.etp} x ep {topology.ep} x pp {topology.pp} x expert-dp {edp}",
        f"batch      {run.global_batch_size} samples of {config.model.seq_length} tokens = {tokens:,} tokens per step; "
        f"{micro} micro-batches of {run.micro_batch_size} on each rank",
        f"steps      {run.steps}, {run.steps * tokens:,} tokens",
        f"model      {config.model.name}: {sum(spec.numel for spec in specs):,} parameters, vocabulary {vocab} "
        f"padded to {padded}, {config.platform.precision}",
        f"data       {config.data.kind}, {config.dp.name}{_unread(config.data)}",
    ]
    lines += [
        f"REFUSED by a run with the megatron-core that is installed here: {error}" for error in lane_errors(config)
    ]
    shards = stage_plans(config, specs, world_size) if isinstance(config.dp, HpFsdp) else []
    if shards:
        lines += shard_lines(config, shards, world_size)
    if not isinstance(config.optimizer, HpMuon):
        whose = "over shards" if isinstance(config.dp, HpFsdp | TorchFsdp2) else "Megatron's own"
        return "\n".join([*lines, f"optimizer  {config.optimizer.name}: {whose}"])
    return "\n".join([*lines, "", *_muon_lines(config, specs, options, shards, world_size)])


def _unread(data: Data) -> str:
    """What a plan does not need, and a run does."""
    if data.kind is DataKind.pydoc:
        return ""
    if not is_named(data.path):
        return "; a run needs data.path"
    missing = [file for prefix in read_blend(data.path).names for file in missing_files(prefix)]
    return f"; NOT THERE, and a run needs it: {', '.join(missing)}" if missing else ""


def warnings_text(config: Train, world_size: int) -> list[str]:
    """What a user should know before a run that is not a mistake.

    Args:
        config: Checked options.
        world_size: Ranks.

    Returns:
        Messages.
    """
    if not isinstance(config.dp, HpFsdp):
        return []
    padded = padded_vocab_size(vocabulary_size(config.data), config.model, config.topology)
    specs = gpt_specs(config.model, config.topology, padded, _muon_options(config))
    return crossing_lines(config, specs, world_size)


def _muon_options(config: Train) -> HpMuon:
    """What decides how fused weights are read; the defaults under another optimizer."""
    return config.optimizer if isinstance(config.optimizer, HpMuon) else HpMuon()


def _muon_lines(
    config: Train, specs: list[ParamSpec], options: HpMuon, shards: list[ShardPlan], world_size: int
) -> list[str]:
    routes = route_parameters(specs, muon_params=options.muon_params, adamw_params=options.adamw_params)
    muon = {route.spec.name: route.spec for route in routes if route.algorithm is Algorithm.muon}
    if shards:
        table = format_table(table_rows(routes, options))
        return [table, "", *muon_lines(config, shards, list(muon.values()), world_size)]
    plans = []
    for stage in range(config.topology.pp):
        held = stage_specs(specs, config.model, config.topology, stage=stage, ep=0)
        plans.append(build_plan([spec for spec in held if spec.name in muon], options, device=device_of(config)))
    busiest = max(range(len(plans)), key=lambda stage: plans[stage].flops)
    is_ddp = isinstance(config.dp, DataParallel)
    return [
        format_table(table_rows(routes, options)),
        "",
        f"Muon step of a rank of pipeline stage {busiest} (the busiest), optimizer.tp_mode={options.tp_mode}:",
        *_plan_lines(plans[busiest]),
        *(replica_lines(config, plans[busiest].params, world_size) if is_ddp else ()),
    ]


def _plan_lines(plan: MuonPlan) -> list[str]:
    lines = [
        f"  {plan.num_matrices} matrices, {gflop(plan.flops)} of Newton-Schulz "
        f"({len(plan.coefficients)} steps), {mib(plan.state_bytes())} of momentum, "
        f"{mib(plan.received_bytes)} received"
    ]
    for stage in plan.stages:
        lines.append(f"  {_stage_text(plan, stage)}:")
        for why, count in Counter(plan.pieces[index].why for index in stage.pieces).items():
            if why:
                lines.append(f"    {count} because {why}")
        for batch in stage.batches:
            shapes = ", ".join(f"{family.count}x[{family.rows},{family.cols}]" for family in batch.families)
            whose = "" if batch.owner is None else f"rank {batch.owner}: "
            lines.append(f"    {whose}short side {batch.short}, {batch.algorithm}: {shapes}")
    return lines


_HOW = {
    Way.local: "whole on the rank, nothing sent",
    Way.gather: "made whole on every rank",
    Way.gram: "never gathered, Gram matrices summed",
    Way.owner: "each made whole on one rank that owns it",
    Way.blockwise: "every rank's slice by itself: an approximation, not Muon's update",
}


def _stage_text(plan: MuonPlan, stage: Stage) -> str:
    """How the matrices of a stage are orthogonalised, what is sent, and the work of a rank."""
    places = range(stage.size)
    busiest = max(places, key=lambda index: (stage.received_bytes_of(index), -index))
    sent = [
        f"{sent.num_calls}x {str(sent.kind).replace('_', '-')} ({sent.received_bytes:,} bytes received)"
        for sent in stage.collectives(busiest)
    ]
    over = f" over {stage.axis} ({stage.size} ranks): {', '.join(sent)}" if stage.axis else ""
    work = [plan.flops_of(stage, index) for index in places]
    spread = f", {max(work) * len(work) / sum(work):.2f} times the mean" if stage.owners and sum(work) else ""
    return f"{_HOW[stage.way]}{over}; {gflop(max(work))}{spread}"
