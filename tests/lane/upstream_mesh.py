"""Sizes and options of the runs of upstream_parallel.py."""

from dataclasses import dataclass, replace
from typing import Any

from hp_muon_plugin.config.trainer import Topology
from lane.combos import PADDED, Features, model_options, topology


@dataclass(frozen=True, slots=True)
class Mesh:
    """A run.

    Attributes:
        features: As in combos.py.
        tied: Whether the output layer is the embedding.
        first: Layers of the first stage, if stages are uneven.
        layers: Layers of the decoder.
        bucket_size: Elements at which a bucket is closed; None for one bucket.
        layout: What each stage has, as Megatron writes it, if that is not told by sizes.
    """

    features: Features
    tied: bool = False
    first: int | None = None
    layers: int = 4
    bucket_size: int | None = None
    layout: str | None = None

    @property
    def sizes(self) -> Topology:
        """Parallel sizes; experts that are not there have the tensor ranks of the rest, as Megatron's arguments do."""
        found = topology(self.features)
        found = replace(found, pp=self.layout.count("|") + 1) if self.layout else found
        return found if model_options(self.features).moe else replace(found, etp=found.tp)

    @property
    def args(self) -> dict[str, Any]:
        """What Megatron's arguments say of it."""
        sizes, vpp = self.sizes, "vpp" in self.features
        return {
            **{"num_layers": self.layers, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2},
            **{"group_query_attention": True, "swiglu": True, "bf16": True, "vocab_size": PADDED},
            **{"tensor_model_parallel_size": sizes.tp, "pipeline_model_parallel_size": sizes.pp},
            **{"expert_model_parallel_size": sizes.ep, "expert_tensor_parallel_size": sizes.etp},
            **{"virtual_pipeline_model_parallel_size": 2 if vpp else None},
            **{"decoder_first_pipeline_num_layers": self.first, "pipeline_model_parallel_layout": self.layout},
            **{"untie_embeddings_and_output_weights": not self.tied, "transformer_impl": "local"},
            **{"mtp_num_layers": 1 if "mtp" in self.features else None, "use_distributed_optimizer": True},
            **{"overlap_grad_reduce": self.bucket_size is not None, "ddp_bucket_size": self.bucket_size},
        }
