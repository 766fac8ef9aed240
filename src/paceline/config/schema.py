"""The whole schema."""

from __future__ import annotations

from pydantic import Field

from paceline.config.environment import EnvironmentConfig
from paceline.config.generation import (
    EvalConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    SpeculationConfig,
    TaskConfig,
)
from paceline.config.training import CheckpointConfig, ClusterConfig, LearnConfig, LogConfig, SpotConfig
from paceline.config.values import COUNT, Name, Section


class Config(Section):
    seed: int = Field(0, ge=0, lt=2**63)
    """Everything random is a function of this number."""
    steps: int = Field(100, ge=1, le=COUNT)
    """RL steps: each is a rollout, its rewards and an update."""
    run_dir: Name | None = None
    """Directory of the run; `null` makes a new one under runs/."""
    model: ModelConfig = ModelConfig()
    """The policy: which model, in which precision, on which device."""
    task: TaskConfig = TaskConfig()
    """Where prompts come from."""
    environment: EnvironmentConfig = EnvironmentConfig()
    """Conversations: what answers the policy's turns, and the tools that it may call."""
    reward: RewardConfig = RewardConfig()
    """Which functions reward completions, and where they run."""
    rollout: RolloutConfig = RolloutConfig()
    """How completions are generated: how many, the sampling parameters, and what the engine may use."""
    speculation: SpeculationConfig = SpeculationConfig()
    """Speculative decoding, which changes how fast tokens come and not which."""
    spot: SpotConfig = SpotConfig()
    """Training the drafter during a run, best while workers would be idle."""
    cluster: ClusterConfig = ClusterConfig()
    """How many workers there are, what they run on, and what happens when one is lost."""
    learn: LearnConfig = LearnConfig()
    """The update: algorithm, optimizer and how the batch is cut."""
    eval: EvalConfig = EvalConfig()
    """Evaluation during a run and by `paceline eval`: always the same prompts with the same noise."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """How often the run is saved, and how much of that is kept."""
    log: LogConfig = LogConfig()
    """Where metrics and completions are written, besides `metrics.jsonl`."""
