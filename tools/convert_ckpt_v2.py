#!/usr/bin/env python3
"""Hugging Face to Megatron and back, with the flags of MindSpeed-LLM's script of the same name.

    python tools/convert_ckpt_v2.py --load-model-type hf --save-model-type mg --load-dir qwen3 --save-dir out \
        --target-tensor-parallel-size 2 --target-pipeline-parallel-size 2 --target-expert-parallel-size 4

Megatron checkpoints are of the legacy form (``mp_rank_*``). Unlike there, Megatron to Megatron works too, with
optimizer state. Flags that cannot be heeded are refused with the reason. All else is ``hp-muon ckpt convert``, which
knows every format; output and exit codes are the same.
"""

import argparse
import re
import sys
from pathlib import Path

from hp_muon_plugin.checkpoint.detect import find
from hp_muon_plugin.checkpoint.formats import open_checkpoint
from hp_muon_plugin.checkpoint.formats.names import EMBEDDING, layer_index
from hp_muon_plugin.cli import ckpt
from hp_muon_plugin.cli.main import run_to_exit
from hp_muon_plugin.errors import CheckpointError

FORMATS = {"hf": "hf", "mg": "torch"}
SPELT = {
    "--tp": "--target-tensor-parallel-size",
    "--pp": "--target-pipeline-parallel-size",
    "--ep": "--target-expert-parallel-size",
    "--to=torch": "--save-model-type=mg",
    "--to=hf": "--save-model-type=hf",
    "SRC=": "--load-dir=",
    "DST=": "--save-dir=",
    "--option expert_tensor_parallel_size": "--expert-tensor-parallel-size",
    "--option make_vocab_size_divisible_by": "--make-vocab-size-divisible-by",
    "--option pipeline_model_parallel_layout": "--pipeline-model-parallel-layout",
}
"""Flags of this script by what messages of ``hp-muon ckpt convert`` call them."""
OTHER = "hp-muon ckpt convert"
CHECKED = ("num_layers", "mtp_num_layers", "first_k_dense_replace", "hidden_size")
"""Flags that say what a checkpoint says too."""
LORA = "LoRA weights are not converted: merge them into the model first"
MAMBA = "Mamba models are not converted"
REFUSED = {
    "noop_layers": "layers that do nothing are not written: use --num-layer-list, and train without them",
    "schedules_method": "only the usual order of stages is written",
    "moe_tp_extend_ep": "whole experts on tensor-parallel ranks are written with --expert-tensor-parallel-size 1 only",
    "mla_mm_split": "up projections are written whole, as megatron-core has them: train without --mla-mm-split",
    "lora_load": LORA,
    "lora_r": LORA,
    "lora_alpha": LORA,
    "lora_target_modules": LORA,
    "save_lora_to_hf": LORA,
    "input_tp_rank": MAMBA,
    "input_pp_rank": MAMBA,
    "mamba_state_dim": MAMBA,
    "mamba_num_groups": MAMBA,
    "mamba_head_dim": MAMBA,
}


def parser() -> argparse.ArgumentParser:
    """The flags, with that script's defaults."""
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    made.add_argument("--load-model-type", choices=list(FORMATS), default="hf")
    made.add_argument("--save-model-type", choices=list(FORMATS), default="mg")
    made.add_argument("--load-dir", type=folder, required=True)
    made.add_argument("--save-dir", type=folder, required=True)
    made.add_argument("--model-type-hf", help="passed over: config.json says it; kept for old scripts")
    made.add_argument("--target-tensor-parallel-size", type=int, default=1)
    made.add_argument("--target-pipeline-parallel-size", type=int, default=1)
    made.add_argument("--target-expert-parallel-size", type=int, default=1)
    made.add_argument("--expert-tensor-parallel-size", type=int)
    made.add_argument("--transformer-impl", choices=["local", "transformer_engine"], default="local")
    made.add_argument("--moe-grouped-gemm", action="store_true")
    stages = "to Megatron; from Megatron the files tell, and it is passed over"
    made.add_argument("--num-layers-per-virtual-pipeline-stage", type=int, help=stages)
    division = made.add_mutually_exclusive_group()
    division.add_argument("--num-layer-list", help=f"layers of each pipeline stage, as 4,4,3; {stages}")
    division.add_argument("--pipeline-model-parallel-layout", help=f"as Megatron spells it; {stages}")
    for name in CHECKED:
        made.add_argument(f"--{name.replace('_', '-')}", type=int, help="the checkpoint tells; refused if it differs")
    made.add_argument("--hf-cfg-dir", type=folder, help="config.json is read from --load-dir; refused if another")
    made.add_argument("--save-layer-by-layer", action="store_true", help="passed over: memory is bounded without")
    made.add_argument("--make-vocab-size-divisible-by", type=int)
    made.add_argument("--vocab-size", type=int)
    made.add_argument("--force", action="store_true", help="replace a checkpoint that is there")
    made.add_argument("--drop", action="store_true", help="go on although the target cannot hold everything")
    for name in REFUSED:
        made.add_argument(f"--{name.replace('_', '-')}", nargs="*", help=argparse.SUPPRESS)
    return made


def folder(text: str) -> str:
    """A folder's name, which is not empty."""
    if not text:
        raise argparse.ArgumentTypeError("is empty: name a folder")
    return text


def respelt(message: str) -> str:
    """A message of ``hp-muon ckpt convert`` with the flags of this script; flags that it lacks are said to be there.

    Args:
        message: What is to be told.
    """
    for theirs, here in SPELT.items():
        end = "" if theirs.endswith("=") else r"(?![\w-])"
        message = re.sub(rf"(?<![\w-]){re.escape(theirs)}{end}", here, message)
    return re.sub(r"(?<!convert )(--(?:option|weights-only|sharding|megatron|dtype|to)\b)", rf"{OTHER} \1", message)


def translated(arguments: list[str]) -> list[str]:
    """Arguments of ``hp-muon`` that do the same.

    Args:
        arguments: As the user wrote them.
    """
    made = parser()
    options = made.parse_args(arguments)
    for name, why in REFUSED.items():
        if getattr(options, name) is not None:
            made.error(f"--{name.replace('_', '-')}: {why}; leave it out")
    check_facts(options, made)
    to = FORMATS[options.save_model_type]
    found = ["ckpt", "convert", options.load_dir, options.save_dir, "--to", to]
    if to == "torch":
        found += ["--tp", str(options.target_tensor_parallel_size)]
        found += ["--pp", str(options.target_pipeline_parallel_size)]
        found += ["--ep", str(options.target_expert_parallel_size)]
        found += ["--option", f"spec={'local' if options.transformer_impl == 'local' else 'te'}"]
        found += ["--option", f"experts={'grouped' if options.moe_grouped_gemm else 'separate'}"]
        if options.expert_tensor_parallel_size is not None:
            found += ["--option", f"expert_tensor_parallel_size={options.expert_tensor_parallel_size}"]
        if options.make_vocab_size_divisible_by is not None:
            found += ["--option", f"make_vocab_size_divisible_by={options.make_vocab_size_divisible_by}"]
        found += stages_of(options, made)
    if options.vocab_size is not None:
        found += ["--vocab-size", str(options.vocab_size)]
    # That script drops the optimizer without a word when it writes for Hugging Face, which can hold weights only.
    drops = options.drop or to == "hf" or options.load_model_type == "hf"
    return found + (["--drop"] if drops else []) + (["--force"] if options.force else [])


def facts_of(source: str) -> dict[str, int] | None:
    """What a checkpoint tells of its model, as the flags of :data:`CHECKED` do; None if it cannot be opened.

    Args:
        source: Its folder.
    """
    try:
        opened = open_checkpoint(Path(source))
    except CheckpointError:
        return None  # the conversion says it
    shapes = {key.name: info.shape for key, info in opened.tensors().items()}
    opened.close()
    layers = {index for name in shapes if (index := layer_index(name)) is not None}
    dense = {layer for layer in layers if f"decoder.layers.{layer}.mlp.linear_fc1.weight" in shapes}
    return {
        "num_layers": len(layers),
        "mtp_num_layers": len({name.split(".")[2] for name in shapes if name.startswith("mtp.layers.")}),
        "first_k_dense_replace": next((layer for layer in sorted(layers) if layer not in dense), len(layers)),
        "hidden_size": shapes[EMBEDDING][1] if EMBEDDING in shapes else 0,
    }


def check_facts(options: argparse.Namespace, made: argparse.ArgumentParser) -> None:
    """Refuse flags that say something else than the checkpoint: that script would cut the model, or fail.

    Args:
        options: The flags.
        made: Whose error it is.
    """
    given = {name: getattr(options, name) for name in CHECKED if getattr(options, name) is not None}
    facts = (facts_of(options.load_dir) if given else None) or given  # what cannot be opened the conversion says
    for name, value in given.items():
        if value != facts[name]:
            has = f"{options.load_dir} has {facts[name]}"
            made.error(f"--{name.replace('_', '-')} {value}: {has}, all of which are converted; leave it out")
    there = Path(options.hf_cfg_dir or options.load_dir)
    if options.hf_cfg_dir is not None and options.load_model_type == "mg":
        made.error(f"--hf-cfg-dir {there}: config.json is made of the checkpoint; leave it out, and copy yours after")
    if there.resolve() != Path(options.load_dir).resolve():
        made.error(f"--hf-cfg-dir {there}: config.json is read from --load-dir; leave it out, and copy it there")


def stages_of(options: argparse.Namespace, made: argparse.ArgumentParser) -> list[str]:
    """Options that say how the pipeline's stages share the layers.

    Args:
        options: The flags.
        made: Whose error it is.
    """
    layout, stages = options.pipeline_model_parallel_layout, options.target_pipeline_parallel_size
    each, counts = options.num_layers_per_virtual_pipeline_stage, options.num_layer_list
    flag = "--num-layers-per-virtual-pipeline-stage" if each is not None else "--num-layer-list"
    if layout is not None:
        return ["--option", f"pipeline_model_parallel_layout={layout}"]
    if each is None and counts is None:
        return []
    if stages < 2:
        made.error(f"{flag}: --target-pipeline-parallel-size is {stages}; choose 2 or more, or leave it out")
    if each is not None and counts is not None:
        made.error("--num-layer-list: not with --num-layers-per-virtual-pipeline-stage; leave one out")
    facts = facts_of(options.load_dir)
    if facts is None:
        return []
    layers = facts["num_layers"]
    if each is not None:
        chunks = layers // (stages * each) if each > 0 and layers % (stages * each) == 0 else 0
        if chunks < 2:
            made.error(f"{flag} {each}: {layers} layers on {stages} stages are not several virtual stages of so many")
        return ["--option", f"virtual_pipeline_model_parallel_size={chunks}"]
    if not re.fullmatch(r"\d+(,\d+)*", counts):
        made.error(f"{flag} {counts}: is no list of numbers, as 4,4,3")
    rows = [int(count) for count in counts.split(",")]
    if len(rows) != stages or sum(rows) != layers:
        made.error(f"{flag} {counts}: name {stages} numbers, one for each stage, that make {layers} layers in all")
    text = "|".join("t" * row for row in rows)
    return ["--option", f"pipeline_model_parallel_layout=E{text}{'m' * facts['mtp_num_layers']}L"]


def check_source(arguments: list[str]) -> None:
    """Refuse a source of the other kind: what it holds beyond weights would be dropped without a word.

    Args:
        arguments: As the user wrote them.
    """
    made = parser()
    options = made.parse_args(arguments)
    try:
        found = find(Path(options.load_dir))
    except CheckpointError:
        return  # the conversion says it
    kind = "hf" if found.format == FORMATS["hf"] else "mg"
    if kind != options.load_model_type:
        made.error(f"--load-model-type {options.load_model_type}: {found.folder} holds a checkpoint of type {kind}")


if __name__ == "__main__":
    check_source(sys.argv[1:])
    given = translated(sys.argv[1:])[1:]
    run_to_exit(lambda: ckpt.run(given, respelt))
