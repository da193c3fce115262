#!/usr/bin/env python3
"""Hugging Face to Megatron and back, with the flags of MindSpeed-LLM's script of the same name.

    python tools/convert_ckpt_v2.py --load-model-type hf --save-model-type mg --load-dir qwen3 --save-dir out \
        --target-tensor-parallel-size 2 --target-pipeline-parallel-size 2 --target-expert-parallel-size 4

Megatron checkpoints are of the legacy form (``mp_rank_*``). Unlike there, Megatron to Megatron works too, with
optimizer state. All else is ``hp-muon ckpt convert``, which knows every format; output and exit codes are the same.
"""

import argparse
import re
import sys
from pathlib import Path

from hp_muon_plugin.checkpoint.detect import find
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
}
"""Flags of this script by what messages of ``hp-muon ckpt convert`` call them."""
OTHER = "hp-muon ckpt convert"
REFUSED = {
    "num_layers_per_virtual_pipeline_stage": "hp-muon ckpt convert has --option virtual_pipeline_model_parallel_size",
    "num_layer_list": "hp-muon ckpt convert has --option pipeline_model_parallel_layout",
    "noop_layers": "layers that do nothing are not written",
    "schedules_method": "only the usual order of stages is written",
    "save_lora_to_hf": "LoRA weights are not converted",
    "lora_load": "LoRA weights are not converted",
}


def parser() -> argparse.ArgumentParser:
    """The flags."""
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    made.add_argument("--load-model-type", choices=list(FORMATS), required=True)
    made.add_argument("--save-model-type", choices=list(FORMATS), required=True)
    made.add_argument("--load-dir", type=folder, required=True)
    made.add_argument("--save-dir", type=folder, required=True)
    made.add_argument("--model-type-hf", help="passed over: config.json says it; kept for old scripts")
    made.add_argument("--target-tensor-parallel-size", type=int, default=1)
    made.add_argument("--target-pipeline-parallel-size", type=int, default=1)
    made.add_argument("--target-expert-parallel-size", type=int, default=1)
    made.add_argument("--expert-tensor-parallel-size", type=int)
    made.add_argument("--transformer-impl", choices=["local", "transformer_engine"], default="transformer_engine")
    made.add_argument("--moe-grouped-gemm", action="store_true")
    made.add_argument("--make-vocab-size-divisible-by", type=int)
    made.add_argument("--vocab-size", type=int)
    made.add_argument("--force", action="store_true", help="replace a checkpoint that is there")
    made.add_argument("--drop", action="store_true", help="go on although the target cannot hold everything")
    for name in REFUSED:
        made.add_argument(f"--{name.replace('_', '-')}", nargs="?", const="", help=argparse.SUPPRESS)
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
    if options.vocab_size is not None:
        found += ["--vocab-size", str(options.vocab_size)]
    # That script drops the optimizer without a word when it writes for Hugging Face, which can hold weights only.
    drops = options.drop or to == "hf" or options.load_model_type == "hf"
    return found + (["--drop"] if drops else []) + (["--force"] if options.force else [])


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
