"""A small GPT pretraining script against ``megatron.training``: nothing in it knows of the plugin.

It stands in for Megatron-LM's own script of this name, which is not part of the megatron-core wheel, and takes
Megatron's arguments. ``--model-path provider`` builds the model by a provider function, as older scripts do, and
``builder`` by a model configuration, as Megatron-LM 0.19 does.
"""

from argparse import ArgumentParser
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Arguments of this script."""
    parser.add_argument("--model-path", choices=["provider", "builder"], default="builder")
    return parser


def provide_model(
    pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None, config: Any = None, **more: Any
) -> torch.nn.Module:
    """One pipeline stage of the model."""
    model_config = gpt_config_from_args(get_args(), config)
    builder = model_config.get_builder_cls()(model_config)
    return builder.build_model(more["pg_collection"], pre_process, post_process, vp_stage)


def provide_datasets(num_samples: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Training, validation and test data."""
    args = get_args()
    blend, per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    kind = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(kind, num_samples, lambda: True, config).build()


provide_datasets.is_distributed = True  # every rank builds them


def compute_loss(mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Sum of the losses of a micro-batch, its tokens, and both as Megatron reports them."""
    flat = mask.view(-1).float()
    loss, num_tokens = torch.sum(output.view(-1).float() * flat), flat.sum().to(torch.int)
    return loss, num_tokens, {"lm loss": torch.cat([loss.detach().view(1), num_tokens.view(1)])}


def forward_step(data: Iterator[dict[str, torch.Tensor]], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    """Forward of one micro-batch."""
    batch = {name: value.cuda(non_blocking=True) for name, value in next(data).items()}
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, partial(compute_loss, batch["loss_mask"])


def main() -> None:
    """Train as the arguments say."""
    args = parse_and_validate_args(extra_args_provider=add_arguments)
    builds = args.model_path == "builder"
    pretrain(
        pretrain_cfg_container_from_args(args, gpt_config_from_args(args) if builds else None),
        provide_datasets,
        ModelType.encoder_or_decoder,
        forward_step,
        model_provider=None if builds else provide_model,
    )


if __name__ == "__main__":
    main()
