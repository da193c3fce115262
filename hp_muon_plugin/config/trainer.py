"""Options of ``hp-muon train`` besides the optimizer."""

from dataclasses import dataclass, field
from typing import Any

from hp_muon_plugin.config.choices import DataKind, Decay, DispatcherType, PlatformName, Precision


@dataclass
class MoE:
    """Mixture of experts in every transformer layer."""

    num_experts: int = 8
    """Experts per layer, over all ranks."""
    top_k: int = 2
    """Experts that each token visits."""
    ffn_hidden_size: int = 128
    """Hidden size of one expert."""
    shared_ffn_hidden_size: int | None = None
    """Hidden size of a shared expert that every token visits; null for none."""
    aux_loss_coeff: float = 1e-2
    """Weight of the load-balancing loss."""
    grouped_gemm: bool = False
    """Ask megatron-core for its grouped expert layer (needs its kernels; not on CPU)."""
    dispatcher: DispatcherType = DispatcherType.alltoall
    """How tokens reach their experts."""


@dataclass
class MLA:
    """Multi-latent attention, as in DeepSeek-V2."""

    q_lora_rank: int | None = 32
    """Rank of the query projection; null for a plain query projection."""
    kv_lora_rank: int = 16
    """Rank of the joint key and value projection."""
    qk_head_dim: int = 16
    """Size per head of the part of q and k without position."""
    qk_pos_emb_head_dim: int = 8
    """Size per head of the rotary part of q and k."""
    v_head_dim: int = 16
    """Size per head of v."""


@dataclass
class Model:
    """A megatron-core GPTModel: RoPE, RMSNorm, gated MLP, no biases."""

    name: str = "tiny"
    """Name in logs."""
    num_layers: int = 4
    """Transformer layers over all pipeline stages."""
    hidden_size: int = 128
    """Width of the residual stream."""
    num_attention_heads: int = 4
    """Query heads."""
    num_query_groups: int = 2
    """Key and value heads (grouped-query attention)."""
    ffn_hidden_size: int = 352
    """Hidden size of the gated MLP of dense layers."""
    seq_length: int = 128
    """Tokens per sample."""
    qk_layernorm: bool = False
    """Normalise queries and keys."""
    tie_embeddings: bool = False
    """Use the word embedding as output layer."""
    rotary_base: int = 10000
    """Base of the rotary frequencies."""
    init_std: float = 0.02
    """Standard deviation of the initial weights."""
    vocab_multiple: int = 64
    """The vocabulary is padded to a multiple of this times ``topology.tp``."""
    moe: MoE | None = None
    """Mixture of experts; null for a dense model."""
    mla: MLA | None = None
    """Multi-latent attention; null for grouped-query attention."""


@dataclass
class Data:
    """Training text in Megatron's ``.bin``/``.idx`` form."""

    kind: DataKind = DataKind.pydoc
    """``pydoc`` builds a byte-level dataset from the text that CPython ships; ``megatron`` reads yours."""
    path: str | None = None
    """Prefix of your ``.bin`` and ``.idx`` files, without the ending."""
    vocab_size: int | None = None
    """Number of token ids in your dataset, before padding. Known for ``pydoc``."""
    eod_id: int | None = None
    """Token id that ends a document; null takes the last id of the vocabulary."""
    split: str = "90,10,0"
    """Shares of train, validation (held out) and test."""
    cache_dir: str = "outputs/data"
    """Where the built dataset and Megatron's index caches are kept."""


@dataclass
class Topology:
    """Ranks and how the model is spread over them."""

    ranks: int | None = None
    """Ranks that ``hp-muon train`` starts on this machine. Under torchrun: null, or the world size."""
    tp: int = 1
    """Tensor-parallel ranks."""
    pp: int = 1
    """Pipeline-parallel stages."""
    ep: int = 1
    """Expert-parallel ranks."""
    etp: int = 1
    """Tensor-parallel ranks inside an expert."""
    sequence_parallel: bool = False
    """Split activations of norms over the tensor-parallel ranks (needs tp > 1)."""
    timeout_s: float = 600.0
    """Seconds after which a collective that a rank does not join is an error."""
    threads: int = 1
    """CPU threads per rank."""


@dataclass
class DataParallel:
    """How gradients are averaged over data-parallel ranks."""

    name: str = "megatron_ddp"
    """Which wrapper."""
    overlap_grad_reduce: bool = False
    """Reduce gradients while the backward pass runs."""
    grad_reduce_in_fp32: bool = True
    """Add up gradients in float32 under bf16 training."""
    bucket_size: int | None = None
    """Elements per reduction; null lets Megatron choose."""


@dataclass
class Platform:
    """Device, compute type and the CPU stand-in."""

    name: PlatformName = PlatformName.auto
    """Where tensors live."""
    precision: Precision = Precision.fp32
    """Compute type of the model."""


@dataclass
class Logger:
    """Where metrics go besides the console."""

    jsonl: bool = True
    """Write ``metrics.jsonl`` into the run's folder."""
    tensorboard: bool = True
    """Write TensorBoard events into the run's folder (needs the ``log`` extra)."""
    wandb: bool = False
    """Send to Weights & Biases (needs the ``log`` extra)."""
    wandb_project: str = "hp_muon"
    """Project name there."""


@dataclass
class LrSchedule:
    """Learning-rate schedule, the same for every parameter group."""

    warmup_steps: int = 20
    """Steps of linear warm-up from 0."""
    decay: Decay = Decay.cosine
    """Shape of the decay after warm-up."""
    min_ratio: float = 0.1
    """Final learning rate as a share of the peak."""


@dataclass
class Run:
    """One training run."""

    name: str = "train"
    """Name of the run; its files go to ``run.dir``."""
    dir: str = "outputs/${run.name}"
    """Folder of logs and metrics."""
    steps: int = 200
    """Optimizer steps."""
    seed: int = 1234
    """Seed of weights and data order."""
    micro_batch_size: int = 8
    """Samples per rank and forward pass."""
    global_batch_size: int = 32
    """Samples per optimizer step over all ranks."""
    log_interval: int = 10
    """Steps between lines of the log (the progress bar moves at every step)."""
    eval_interval: int = 100
    """Steps between evaluations on held-out text; the last step is always followed by one."""
    eval_batches: int = 4
    """Global batches of held-out text per evaluation."""
    canonical_init: bool = False
    """Same initial weights whatever the parallel layout (slower start; for comparing layouts)."""
    dry: bool = False
    """Print the plan and stop before any process group starts."""


@dataclass
class Train:
    """The whole configuration of ``hp-muon train``."""

    optimizer: Any = None
    """``hp_muon`` or ``adamw``; see config/optimizer.py."""
    dp: DataParallel = field(default_factory=DataParallel)
    """Data parallelism."""
    model: Model = field(default_factory=Model)
    """Model."""
    data: Data = field(default_factory=Data)
    """Data."""
    topology: Topology = field(default_factory=Topology)
    """Ranks."""
    logger: Logger = field(default_factory=Logger)
    """Loggers."""
    platform: Platform = field(default_factory=Platform)
    """Platform."""
    lr_schedule: LrSchedule = field(default_factory=LrSchedule)
    """Learning-rate schedule."""
    run: Run = field(default_factory=Run)
    """Run."""
