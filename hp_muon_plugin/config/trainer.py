"""Options of ``hp-muon train`` besides the optimizer."""

from dataclasses import dataclass, field
from typing import Any

from hp_muon_plugin.config.choices import (
    DataKind,
    Decay,
    DispatcherType,
    PlatformName,
    Precision,
)
from hp_muon_plugin.config.data_parallel import DataParallel
from hp_muon_plugin.config.ranges import number

_WARMUP_STEPS = 20


@dataclass
class MoE:
    """Mixture of experts in transformer layers."""

    num_experts: int = number(8, least=1)
    """Experts per layer, over all ranks."""
    top_k: int = number(2, least=1)
    """Experts that each token visits."""
    ffn_hidden_size: int = number(128, least=1)
    """Hidden size of one expert."""
    shared_ffn_hidden_size: int | None = number(None, least=1, example=128)
    """Hidden size of a shared expert that every token visits; null for none."""
    first_dense_layers: int = number(0, least=0)
    """Layers at the bottom of the model that have a dense MLP instead, as in DeepSeek-V3."""
    aux_loss_coeff: float = number(1e-2, least=0)
    """Weight of the load-balancing loss."""
    grouped_gemm: bool = False
    """Ask megatron-core for its grouped expert layer (needs its kernels; not on CPU)."""
    dispatcher: DispatcherType = DispatcherType.alltoall
    """How tokens reach their experts."""


@dataclass
class MLA:
    """Multi-latent attention, as in DeepSeek-V2."""

    q_lora_rank: int | None = number(32, least=1)
    """Rank of the query projection; null for a plain query projection."""
    kv_lora_rank: int = number(16, least=1)
    """Rank of the joint key and value projection."""
    qk_head_dim: int = number(16, least=1)
    """Size per head of the part of q and k without position."""
    qk_pos_emb_head_dim: int = number(8, least=2)
    """Size per head of the rotary part of q and k."""
    v_head_dim: int = number(16, least=1)
    """Size per head of v."""


@dataclass
class Model:
    """A megatron-core GPTModel: RoPE, RMSNorm, gated MLP, no biases."""

    name: str = "tiny"
    """Name in logs."""
    num_layers: int = number(4, least=1)
    """Transformer layers over all pipeline stages."""
    hidden_size: int = number(128, least=1)
    """Width of the residual stream."""
    num_attention_heads: int = number(4, least=1)
    """Query heads."""
    num_query_groups: int = number(2, least=1)
    """Key and value heads (grouped-query attention; multi-latent attention has none)."""
    ffn_hidden_size: int = number(352, least=1)
    """Hidden size of the gated MLP of dense layers."""
    seq_length: int = number(128, least=1)
    """Tokens per sample."""
    qk_layernorm: bool = False
    """Normalise queries and keys."""
    tie_embeddings: bool = False
    """Use the word embedding as output layer."""
    rotary_base: int = number(10000, above=1)
    """Base of the rotary frequencies."""
    init_std: float = number(0.02, above=0)
    """Standard deviation of the initial weights."""
    vocab_multiple: int = number(64, least=1)
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
    path: Any = None
    """Prefix of your ``.bin`` and ``.idx`` files, without the ending; or what else Megatron's ``--data-path`` takes:
    several prefixes, or weights and prefixes by turns, as a list or as one text with spaces (docs/data.md)."""
    vocab_size: int | None = number(None, least=1, example=32000)
    """Number of token ids in your dataset, before padding. Known for ``pydoc``."""
    eod_id: int | None = number(None, least=0, example=0)
    """Token id that ends a document, for the next two; null takes the last id of the vocabulary."""
    eod_mask_loss: bool = False
    """Do not count the loss of the token after the end of a document (Megatron's option of this name)."""
    reset_attention_mask: bool = False
    """Let tokens attend to their own document only (Megatron's option of this name). Positions are relative
    under RoPE, so that Megatron's ``reset_position_ids`` would change nothing and is not here."""
    split: str = "90,10,0"
    """Shares of train, validation (held out) and test."""
    cache_dir: str = "outputs/data"
    """Where the built dataset and Megatron's index caches are kept."""


@dataclass
class Topology:
    """Ranks and how the model is spread over them."""

    ranks: int | None = number(None, least=1, example=2)
    """Ranks that ``hp-muon train`` starts on this machine. Under torchrun: null, or the world size."""
    tp: int = number(1, least=1)
    """Tensor-parallel ranks."""
    pp: int = number(1, least=1)
    """Pipeline-parallel stages."""
    ep: int = number(1, least=1)
    """Expert-parallel ranks."""
    etp: int = number(1, least=1)
    """Tensor-parallel ranks inside an expert."""
    sequence_parallel: bool = False
    """Split activations of norms over the tensor-parallel ranks (needs tp > 1)."""
    timeout_s: float = number(600.0, above=0, most=1e7)
    """Seconds after which a collective that a rank does not join is an error."""
    threads: int = number(1, least=1, most=1024)
    """CPU threads per rank."""
    ranks_per_supernode: int | None = number(None, least=1, example=16)
    """Consecutive ranks behind fast links. null: known from RANK_TABLE_FILE or torchrun's nodes, else all ranks."""


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
    tensorboard: bool | None = None
    """Write TensorBoard events into the run's folder (needs the ``log`` extra); null: where it is installed."""
    wandb: bool = False
    """Send to Weights & Biases (needs the ``log`` extra)."""
    wandb_project: str = "hp_muon"
    """Project name there."""


@dataclass
class Monitor:
    """What is measured in some steps besides the loss; docs/monitoring.md."""

    interval: int = number(0, least=0, example=50)
    """Steps between measurements, which the first and the last step have too; 0 measures nothing."""
    weights: bool = True
    """RMS of weights by role."""
    updates: bool = True
    """RMS of what a step changes of them (holds a copy of this rank's weights during a measured step)."""
    per_layer: bool = False
    """Tell layers apart in both."""
    outputs: bool = True
    """RMS of the output of every transformer layer."""
    singular_values: bool = True
    """Singular values of one of Muon's updates per role (gathers it on every rank in a measured step)."""
    times: bool = True
    """Shares of Newton-Schulz, communication and the optimizer in the time of a step."""


@dataclass
class Checkpoint:
    """Saving and resuming; docs/checkpoint_resume.md."""

    save: str | None = None
    """Folder of the run's checkpoints; null: ``checkpoints`` in the run's folder."""
    every: int | None = number(None, least=1, example=100)
    """Steps between checkpoints, the last step has one too; null saves the last step alone if ``save`` names a
    folder, and otherwise none."""
    keep: int | None = number(None, least=1, example=3)
    """How many of the newest checkpoints stay, besides the one that the run was resumed from; null for all."""
    asynchronous: bool = False
    """Train on while files are written; costs host memory for a copy of what this rank writes."""
    on_interrupt: bool = False
    """Save after Ctrl-C or SIGTERM, when the step that is under way has ended."""
    interrupt_s: float = number(120.0, above=0, most=1e6)
    """Seconds that this may take before ranks are killed."""
    resume: str | None = None
    """``auto``: the last whole checkpoint in ``save``, if there is one. Or a folder. null begins anew."""
    load_optimizer: bool = True
    """Resume the optimizer's state; false keeps weights alone."""
    load_position: bool = True
    """Resume the step, the learning-rate schedule and the place in the data."""
    load_random: bool = True
    """Resume random states, where the ranks are the same."""
    verify: bool = True
    """Compare the hash of every file before resuming."""


def default_warmup(steps: int) -> int:
    """Steps of warm-up of a run that names none.

    Args:
        steps: Of the run.
    """
    return min(_WARMUP_STEPS, steps // 10)


@dataclass
class LrSchedule:
    """Learning-rate schedule, the same for every parameter group."""

    warmup_steps: int | None = number(None, least=0, example=20)
    """Steps of linear warm-up from 0; null: a tenth of ``run.steps``, and 20 at most."""
    decay: Decay = Decay.cosine
    """Shape of the decay after warm-up."""
    min_ratio: float = number(0.1, least=0, most=1)
    """Final learning rate as a share of the peak; ``decay=constant`` stays at the peak."""


@dataclass
class Run:
    """One training run."""

    name: str = "train"
    """Name of the run; its files go to ``run.dir``."""
    dir: str = "outputs/${run.name}"
    """Folder of logs and metrics."""
    steps: int = number(200, least=1)
    """Optimizer steps."""
    seed: int = number(1234, least=0, most=2**32 - 1)
    """Seed of weights and data order."""
    micro_batch_size: int = number(4, least=1)
    """Samples per rank and forward pass."""
    global_batch_size: int = number(32, least=1)
    """Samples per optimizer step over all ranks."""
    log_interval: int = number(10, least=1)
    """Steps between lines of the log (the progress bar moves at every step)."""
    eval_interval: int = number(100, least=1)
    """Steps between evaluations on held-out text; the last step is always followed by one."""
    eval_batches: int = number(4, least=1)
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
    dp: Any = None
    """``megatron_ddp``, ``hp_fsdp``, ``hp_hsdp``, ``torch_fsdp2`` or ``megatron_fsdp``; see config/data_parallel.py.
    None: the first."""
    model: Model = field(default_factory=Model)
    """Model."""
    data: Data = field(default_factory=Data)
    """Data."""
    topology: Topology = field(default_factory=Topology)
    """Ranks."""
    logger: Logger = field(default_factory=Logger)
    """Loggers."""
    monitor: Monitor = field(default_factory=Monitor)
    """Measurements."""
    platform: Platform = field(default_factory=Platform)
    """Platform."""
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    """Checkpoints."""
    lr_schedule: LrSchedule = field(default_factory=LrSchedule)
    """Learning-rate schedule."""
    run: Run = field(default_factory=Run)
    """Run."""

    def __post_init__(self) -> None:
        if self.dp is None:
            self.dp = DataParallel()
