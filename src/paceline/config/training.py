"""Settings of what learns, on which workers, and what is kept: spot, cluster, learn, checkpoint, log."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field, field_validator, model_validator

from paceline.config.values import COUNT, GIGABYTES, PROCESSES, REQUESTS, SECONDS, TOKENS, Name, Section


def _known_algorithm(name: str) -> str:
    from paceline.learn.algorithms import check_algorithm  # loads torch, which most commands do not need

    return check_algorithm(name)


Algorithm = Annotated[str, AfterValidator(_known_algorithm)]
Aggregate = Literal["sequence_mean", "sequence_sum", "token_mean", "constant"]
MomentDecay = Annotated[float, Field(ge=0, lt=1)]
ALL_LINEAR: Literal["all-linear"] = "all-linear"
LoraTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TARGETS: tuple[LoraTarget, ...] = get_args(LoraTarget)
"""Linear maps of a layer that can have an adapter."""
MAX_RANK = 4096


class SpotConfig(Section):
    when: Literal["auto", "off", "tail", "update", "both"] = "auto"
    """When the drafter is trained: in the tail of a rollout by workers with nothing left to decode, after each update
    on hidden states of the learner's forward pass, both, or never. `auto` is the tail where there are several workers
    and a neural drafter; with one worker, after the update if the drafter begins untrained, and otherwise never."""
    share: float = Field(0.1, gt=0, le=1)
    """Time for drafter training after an update, as a share of the step's time."""
    invest: bool = False
    """Train the drafter beyond idle time, after an update, for as long as what a better one saves in the steps that are
    left is expected to pay that back within the run; instead of `share`. For drafters that begin untrained; off because
    whole runs were not measured yet (benchmarks/from_nothing.py)."""
    buffer_mb: float = Field(256, gt=0, le=1000 * GIGABYTES)
    """Memory for training samples of the drafter: tokens and hidden states of completions."""
    step_ms: float = Field(50, gt=0, le=1000 * SECONDS)
    """How long one optimizer step of the drafter may take."""
    drafter_lr: float | None = Field(None, gt=0)
    """Learning rate of the drafter; `null` follows the policy's width, and is a tenth of that for a drafter that was
    trained before."""
    merge_share: float = Field(0.02, gt=0, le=1)
    """Most of the run's time for merging and evaluating new versions of the drafter, as a share: where it takes long,
    versions are made less often."""
    max_interval: int = Field(8, ge=1, le=COUNT)
    """Most steps between trainings of the drafter: the interval doubles up to this while new versions are no better; 1
    trains in every step."""
    loss: Literal["soft", "overlap"] = "soft"
    """Cross-entropy with the policy's distribution, or one minus the probability that a draft token is accepted."""

    @field_validator("when", mode="before")
    @classmethod
    def _off(cls, value: Any) -> Any:
        return "off" if value is False else value  # YAML takes the word off for false


class ClusterConfig(Section):
    workers: int = Field(1, ge=0, le=PROCESSES)
    """Workers, each with the policy, an engine, the drafter and its part of the learner: one per GPU, or per group of
    CPU cores. One runs in the trainer's own process. 0 takes one for every GPU, or two on a CPU with several cores."""
    backend: Name = "local"
    """Transport to the workers. `local`: processes on this machine; `ray`: actors of a Ray cluster (install
    paceline[ray]), where the run directory must be on a disk that all machines share."""
    address: Name | None = None
    """Of the Ray cluster; `null` starts one on this machine."""
    workers_per_gpu: int = Field(1, ge=1, le=PROCESSES)
    """More than one share a GPU, best under NVIDIA MPS."""
    timeout_s: float = Field(300.0, gt=0, le=SECONDS)
    """A worker that has work and sends no message for so many seconds is given up as lost."""
    start_timeout_s: float = Field(1800.0, gt=0, le=SECONDS)
    """Seconds that a worker may take to start and load the model; after that it is given up."""
    restarts: int = Field(3, ge=0, le=COUNT)
    """How often each worker that was lost is started again; the others go on meanwhile."""
    collectives: Literal["auto", "gloo", "nccl"] = "auto"
    """Backend of torch.distributed. `auto` is NCCL where every worker has a GPU of its own, gloo otherwise."""
    port: int = Field(0, ge=0, lt=65536)
    """Port of the rendezvous between workers; 0 takes a free one."""


class LoraConfig(Section):
    rank: int | None = Field(None, ge=0, le=MAX_RANK)
    """Rank of the adapters; 0 or `null` trains all weights (with `path`, `null` is the rank of the adapter there)."""
    alpha: float | None = Field(None, gt=0)
    """Adapters are scaled by alpha / rank; `null` is twice the rank, or what the adapter at `path` has."""
    targets: Literal["all-linear"] | Annotated[list[LoraTarget], Field(min_length=1)] = ALL_LINEAR
    """Linear maps that get an adapter: `all-linear`, or some of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj,
    down_proj."""
    path: Name | None = None
    """Folder or hub id of a LoRA adapter in PEFT's form to begin with; `null` begins with fresh ones, which change
    nothing at first."""
    base: Literal["device", "host"] | None = None
    """Where the weights without adapters are kept: in the device's memory or in the host's; `null` is the device where
    that leaves room for the rollout."""

    @model_validator(mode="after")
    def _off(self) -> LoraConfig:
        if self.path and self.rank == 0:
            raise ValueError("path names an adapter to begin with, but rank = 0 trains without any; leave rank out")
        return self


class LearnConfig(Section):
    algorithm: Algorithm = "grpo"
    """`grpo`, `dr_grpo`, `dapo`, `rloo` or `reinforce_pp`: sets the defaults of the entries below that are `null`."""
    lr: float = Field(1e-6, gt=0)
    """Peak learning rate."""
    warmup_steps: int = Field(0, ge=0, le=COUNT)
    """Updates of linear warm-up."""
    lr_scheduler: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or down to `min_lr_ratio` at the last step."""
    min_lr_ratio: float = Field(0.0, ge=0)
    """Learning rate at the last step, as a share of `lr`."""
    betas: tuple[MomentDecay, MomentDecay] = (0.9, 0.999)
    """AdamW's moment decays."""
    eps: float = Field(1e-8, gt=0)
    """AdamW's epsilon."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's decoupled weight decay; norms and biases are left out."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are clipped to this global norm."""
    epochs: int = Field(1, ge=1, le=1000)
    """Passes over the completions of a step."""
    minibatches: int = Field(1, ge=1, le=REQUESTS)
    """Updates per pass."""
    micro_tokens: int = Field(16384, ge=1, le=TOKENS)
    """Tokens in one packed forward and backward pass; a longer sequence runs alone."""
    activation_checkpointing: bool = False
    """Recompute layers in the backward pass: less memory, about a third more time."""
    optimizer_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of AdamW's two moments (never below that of float64 weights). bfloat16 takes half the memory, with
    stochastic rounding so that small changes count on average."""
    master_weights: bool = True
    """Keep a float32 copy of bfloat16 weights, so that small updates are not lost to rounding."""
    clip_low: float | None = Field(None, ge=0)
    """The probability ratio is clipped at 1 - clip_low."""
    clip_high: float | None = Field(None, ge=0)
    """The probability ratio is clipped at 1 + clip_high."""
    aggregate: Aggregate | None = None
    """How token losses are aggregated to one loss."""
    kl_coef: float = Field(0.0, ge=0)
    """Coefficient of the KL divergence to the first policy, of which a frozen copy is kept; with `lora` none is
    needed."""
    importance_sampling_cap: float | None = Field(2.0, gt=0)
    """Truncated importance sampling: cap on the ratio of the learner's to the engine's token probability, which weighs
    the loss of the token; `null` turns it off."""
    dynamic_sampling: bool | None = None
    """Replace groups whose completions all have the same reward by new prompts (DAPO)."""
    dynamic_sampling_rounds: int = Field(3, ge=1, le=1000)
    """Most rollouts per step of dynamic sampling."""
    overlong_buffer: int | None = Field(None, ge=0, le=TOKENS)
    """Completions that enter the last this many tokens before max_tokens get a linear penalty (DAPO); 0 turns it
    off."""
    overlong_penalty: float = Field(1.0, ge=0)
    """That penalty at max_tokens."""
    max_bad_updates: int = Field(3, ge=1, le=COUNT)
    """Updates in a row with a loss or gradient that is not finite before the run stops."""
    lora: LoraConfig = LoraConfig()
    """Train low-rank adapters instead of all weights."""


class CheckpointConfig(Section):
    every: int = Field(10, ge=0, le=COUNT)
    """Steps between checkpoints; 0 saves only at the end."""
    keep: int = Field(2, ge=1, le=COUNT)
    """Newest checkpoints that stay on disk."""


class LogConfig(Section):
    tensorboard: bool = True
    """Write TensorBoard events into the run directory."""
    wandb: Name | None = None
    """Project name for Weights & Biases."""
    trackio: Name | None = None
    """Project name for trackio."""
    samples: int = Field(4, ge=0, le=REQUESTS)
    """Completions written to samples.jsonl per step."""
