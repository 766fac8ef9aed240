"""Every setting of Paceline, typed, with a default and a description, and how settings are read.

A recipe is a YAML file of the schema's shape; `key.sub=value` overrides come last. `None` means "what the algorithm or
the machine suggests"; the run directory keeps the resolved values.

    schema, generation, environment, training    the settings themselves; a docstring is a setting's documentation
    values                          types and bounds that they share
    loading                         recipes and overrides -> a validated `Config`
    renamed                         names that settings had before, which keep working
    describe                        the list of all settings, and one sentence for what is wrong with one
    kinds                           their types in words
    foreign                         what TRL, verl and engines call them
"""

from paceline.config.describe import describe_settings, did_you_mean, find_settings, setting_names
from paceline.config.environment import EnvironmentConfig
from paceline.config.foreign import translate
from paceline.config.generation import (
    EvalConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    SpeculationConfig,
    TaskConfig,
)
from paceline.config.loading import (
    COMMAND_LINE,
    DEMO,
    RECIPES,
    build_config,
    change_settings,
    config_from,
    demo_recipe,
    describe_recipe,
    flat,
    load_config,
    read_overrides,
    read_recipes,
    read_settings,
    recipe_names,
)
from paceline.config.schema import Config
from paceline.config.training import Aggregate, Algorithm, ClusterConfig, LearnConfig, LoraConfig, SpotConfig

__all__ = [
    "COMMAND_LINE",
    "DEMO",
    "RECIPES",
    "Aggregate",
    "Algorithm",
    "ClusterConfig",
    "Config",
    "EnvironmentConfig",
    "EvalConfig",
    "LearnConfig",
    "LoraConfig",
    "ModelConfig",
    "RewardConfig",
    "RolloutConfig",
    "SpeculationConfig",
    "SpotConfig",
    "TaskConfig",
    "build_config",
    "change_settings",
    "config_from",
    "demo_recipe",
    "describe_recipe",
    "describe_settings",
    "did_you_mean",
    "find_settings",
    "flat",
    "load_config",
    "read_overrides",
    "read_recipes",
    "read_settings",
    "recipe_names",
    "setting_names",
    "translate",
]
