"""Every setting of Paceline, typed, with a default and a description.

A recipe is a YAML file with the same shape; `key.sub=value` overrides come last. `None` means "what the algorithm or
the machine suggests"; the run directory keeps the resolved values.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from paceline.draft.strategy import Strategy
from paceline.errors import UserError
from paceline.files import reading
from paceline.learn.algorithms import check_algorithm

RECIPES = Path(__file__).parent / "recipes"
DEFAULT_RECIPE = "default"
EMBEDDED_NAME = "embedded"
RECIPE_BYTES = 256 * 2**10
"""Of a recipe: the largest that anybody would write, and the YAML parser takes a second for it."""
DEEPEST = 20
"""Parts of a dotted key."""
# Bounds on numbers that could only be mistakes, and would otherwise end in hours of waiting or without memory.
COUNT = 2**62
TOKENS = 2**31 - 1
REQUESTS = 2**20
"""Answers of one step."""
SECONDS = 1e6
"""Of a time limit: eleven days. What waits for a process takes milliseconds as 32-bit numbers."""
GIGABYTES = 1e6
PROCESSES = 1024


def _no_zero(text: str) -> str:
    if "\0" in text:
        raise ValueError("it holds a zero byte, which no name or path can")
    return text


Name = Annotated[str, Field(min_length=1), AfterValidator(_no_zero)]
"""Of a file, a folder, a device, a column: something that is called by it."""


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    """Numbers, texts, truth values, lists and sections: what a recipe can say and a run directory can keep."""
    level: list[Any] = [options]
    for _ in range(reading.MAX_DEPTH):
        below: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                if not all(isinstance(key, str) for key in one):
                    raise ValueError("its keys should be text")
                below += one.values()
            elif isinstance(one, list | tuple):
                below += one
            elif isinstance(one, float) and not math.isfinite(one):
                raise ValueError("it holds a number that is not finite")
            elif one is not None and not isinstance(one, str | int | float):
                raise ValueError(f"it holds a {type(one).__name__}, which is not a number, text, list or section")
        if not below:
            return options
        level = below
    raise ValueError(f"it is nested more than {reading.MAX_DEPTH} levels deep")


def _number(text: str) -> Any:
    """YAML reads 1e-5 as text (it wants a dot), but nobody who writes it for a number means text."""
    try:
        return float(text) if text[:1] in "0123456789.-+" else text
    except ValueError:
        return text


def _numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _numbers(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_numbers(one) for one in value]
    return _number(value) if isinstance(value, str) else value


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_default=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _number_or_not(cls, value: Any, info: ValidationInfo) -> Any:
        """YAML takes yes, no, on and off for truth values, and a temperature that is off would be 0."""
        kind = cls.model_fields[info.field_name].annotation if info.field_name else None
        if not {kind, *get_args(kind)} & {int, float}:
            return value
        if isinstance(value, bool):
            raise ValueError(f"it should be a number, but YAML takes what was written for {str(value).lower()}")
        return _number(value) if isinstance(value, str) else value


class ModelConfig(Section):
    path: Name = "embedded"
    """A folder with a Hugging Face checkpoint, a hub id, or `embedded` for the reasoner that ships with Paceline."""
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Precision of the weights. `auto` is bfloat16 on a GPU and float32 on a CPU."""
    device: Name = "auto"
    """`cpu`, `cuda`, `cuda:1`, or `auto` for a GPU when there is one."""
    threads: int | None = Field(None, ge=1, le=PROCESSES)
    """CPU threads for tensor work; `null` leaves torch's own choice."""


class TaskConfig(Section):
    name: Name = "countdown"
    """`countdown`, `gym:NAME` for a reasoning-gym task, a .jsonl or .parquet file, or `hub:ID` for a hub data set."""
    difficulty: Name = "medium"
    """Countdown only: easy, medium, hard, expert, or `tail`: mostly quick, one in 16 so hard that answers are long."""
    problems: int | None = Field(None, ge=1, le=COUNT)
    """Countdown only: how many different problems there are, visited again and again; `null` never repeats one."""
    style: Literal["auto", "search", "chat", "text"] = "auto"
    """Generated tasks: how prompts are worded. `search` is the embedded model's own format, the others ask in words."""
    split: Name = "train"
    """Split of a hub data set."""
    prompt_column: Name = "prompt"
    """Column of a data set that holds the prompt, as text or as messages."""
    system: Annotated[str, Field(min_length=1)] | None = None
    """A system message put before prompts that are messages."""
    options: Annotated[dict[str, Any], BeforeValidator(_numbers), AfterValidator(_plain)] = Field(default_factory=dict)
    """Passed on to the reasoning-gym task."""
    shuffle: bool = True
    """Visit the samples of a data set in an order drawn from the seed, anew in every epoch."""
    max_prompt_tokens: int | None = Field(None, ge=1, le=TOKENS)
    """Prompts longer than this are an error; `null` allows what the model's context leaves room for."""


class RewardFunctionConfig(Section):
    function: Name
    """`countdown`, `exact_match`, `math`, `gym`, or your own as `module:function` or `file.py:function`."""
    weight: float = 1.0
    """What its value is multiplied with before the values are summed."""


class RewardConfig(Section):
    functions: list[RewardFunctionConfig] = Field(default_factory=list)
    """The reward functions; empty means the task's own."""
    workers: int = Field(1, ge=0, le=PROCESSES)
    """Processes that run rewards beside decoding. 0 runs them in the trainer, where nothing can stop a hanging one."""
    timeout_s: float = Field(30.0, gt=0, le=SECONDS)
    """Seconds that one call may take."""
    start_timeout_s: float = Field(120.0, gt=0, le=SECONDS)
    """Seconds that importing the functions may take."""
    on_error: Literal["stop", "value"] = "stop"
    """A reward that raises, hangs or returns NaN: `stop` the run after saving, or count it as `error_value`."""
    error_value: float = 0.0
    """What a failed reward counts as when `on_error` is `value`."""


class RolloutConfig(Section):
    prompts: int = Field(16, ge=1, le=REQUESTS)
    """Prompts per step."""
    samples: int = Field(8, ge=1, le=REQUESTS)
    """Answers per prompt: the size of a group."""
    temperature: float = Field(1.0, ge=0)
    """How evenly tokens are drawn: 1 as the policy has it, lower is surer, 0 always takes the likeliest (greedy)."""
    top_k: int = Field(0, ge=0, le=TOKENS)
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Keep the smallest set of tokens whose probability reaches this."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Keep tokens at least this likely relative to the most likely one."""
    max_tokens: int = Field(512, ge=1, le=TOKENS)
    """Longest answer."""
    min_tokens: int = Field(0, ge=0, le=TOKENS)
    """An answer cannot end by a stop token before it has this many tokens."""
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """Texts that end an answer."""
    max_batch: int = Field(256, ge=1, le=REQUESTS)
    """Most requests that decode at the same time."""
    page_size: int | None = Field(None, ge=1, le=TOKENS)
    """Tokens per KV page; `null` is 64 on a GPU and 256 on a CPU, which reads whole pages (1024 for one request)."""
    kv_memory_gb: float | None = Field(None, gt=0, le=GIGABYTES)
    """Memory for KV pages; `null` takes what the batch can use, up to 2 GB on a CPU, and on a GPU up to half of it and
    to what everything else leaves (`paceline plan` shows it)."""
    prefill_tokens: int = Field(8192, ge=1, le=TOKENS)
    """Most prompt tokens that one prefill pass takes; a longer prompt runs alone."""
    cuda_graphs: bool = True
    """Replay captured graphs for decoding on CUDA."""

    @model_validator(mode="after")
    def _lengths(self) -> RolloutConfig:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) is larger than max_tokens ({self.max_tokens})")
        if self.prompts * self.samples > REQUESTS:
            raise ValueError(
                f"prompts ({self.prompts}) times samples ({self.samples}) is more than {REQUESTS:,} answers per step"
            )
        return self


class SpeculationConfig(Section):
    mode: Literal["adaptive", "plain"] = "adaptive"
    """`adaptive` guesses ahead where that pays, `plain` never does; the answers are the same."""
    drafter: Name | None = "auto"
    """Folder of a neural drafter, of Paceline's own or in the EAGLE-3 form of vLLM, SGLang or speculators; `auto` takes
    the one in the model's own folder, if there is one; `new` begins with an untrained one; `none` uses none."""
    suffix: bool = True
    """Guess from what was written before in answers to the same prompt."""
    suffix_mb: float = Field(64, gt=0, le=1000 * GIGABYTES)
    """Memory for those answers."""
    strategies: list[str] | None = None
    """What to choose from, as drafter:depth[xwidth][/nodes], for example [suffix:8, neural:5]; `null` is a good set."""
    explore: float = Field(0.02, ge=0, le=0.5)
    """Share of the rollout time that may go to trying strategies that are not the best known."""
    graph_memory_gb: float | None = Field(None, gt=0, le=GIGABYTES)
    """Most GPU memory for captured graphs; what comes after runs without one."""

    @field_validator("strategies")
    @classmethod
    def _strategies(cls, texts: list[str] | None) -> list[str] | None:
        try:
            for text in texts or []:
                Strategy.parse(text)
        except UserError as err:
            raise ValueError(str(err)) from err
        return texts


class SpotConfig(Section):
    when: Literal["auto", "off", "tail", "update", "both"] = "auto"
    """When the drafter is trained: in the tail of a rollout by workers that have run dry, after each update on what the
    learner's own pass has seen, both, or never. `auto` is the tail where there are several workers and a neural
    drafter; with one worker, after the update if the drafter begins untrained, and otherwise never."""
    share: float = Field(0.1, gt=0, le=1)
    """Share of the step's time that goes into it after an update."""
    buffer_mb: float = Field(256, gt=0, le=1000 * GIGABYTES)
    """Memory for the answers to learn from, and what the policy thought of them."""
    step_ms: float = Field(50, gt=0, le=1000 * SECONDS)
    """How long one training step may take."""
    drafter_lr: float | None = Field(None, gt=0)
    """Learning rate; `null` suits it to the policy's width, and is gentler with a drafter that was trained before."""
    merge_share: float = Field(0.02, gt=0, le=1)
    """Most of the run's time that making and judging new versions may take: where it takes long, it is done less
    often."""
    rarely: int = Field(8, ge=1, le=COUNT)
    """Where training wins nothing any more it becomes rarer, down to one step in so many; 1 never backs off."""
    loss: Literal["soft", "overlap"] = "soft"
    """Cross-entropy with the policy's distribution, or the probability that a guess is accepted."""

    @field_validator("when", mode="before")
    @classmethod
    def _off(cls, value: Any) -> Any:
        return "off" if value is False else value  # YAML takes the word off for false


class ClusterConfig(Section):
    workers: int = Field(1, ge=0, le=PROCESSES)
    """Workers, each with the policy, an engine, the drafter and its part of the learner: one per GPU, or per group of
    CPU cores. One runs in the trainer's own process. 0 takes one for every GPU, or two on a CPU with several cores."""
    backend: Literal["local", "ray"] = "local"
    """Processes on this machine, or actors of a Ray cluster (install paceline[ray]); the run directory must then be on
    a disk that all machines share."""
    address: Name | None = None
    """Of the Ray cluster; `null` starts one on this machine."""
    workers_per_gpu: int = Field(1, ge=1, le=PROCESSES)
    """More than one share a GPU, best under NVIDIA MPS."""
    timeout_s: float = Field(300.0, gt=0, le=SECONDS)
    """A worker that has something to do and says nothing for so many seconds is given up as lost."""
    start_timeout_s: float = Field(1800.0, gt=0, le=SECONDS)
    """Seconds that a worker may take to start and load the model; after that it is given up."""
    restarts: int = Field(3, ge=0, le=COUNT)
    """How often each worker that was lost is started again; the others go on meanwhile."""
    collectives: Literal["auto", "gloo", "nccl"] = "auto"
    """How gradients are summed. `auto` is NCCL where every worker has a GPU of its own, gloo otherwise."""
    port: int = Field(0, ge=0, lt=65536)
    """On which workers meet; 0 takes a free one."""


Algorithm = Annotated[str, AfterValidator(check_algorithm)]
Aggregate = Literal["sequence_mean", "sequence_sum", "token_mean", "constant"]


Decay = Annotated[float, Field(ge=0, lt=1)]


class LearnConfig(Section):
    algorithm: Algorithm = "grpo"
    """Sets the defaults of the entries below that are `null`."""
    lr: float = Field(1e-6, gt=0)
    """Peak learning rate."""
    warmup_steps: int = Field(0, ge=0, le=COUNT)
    """Updates over which the rate rises linearly."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the rate after the warm-up, down to `lr_end` at the last step."""
    lr_end: float = Field(0.0, ge=0)
    """Rate at the end of the decay, as a share of `lr`."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """AdamW's moment decays."""
    eps: float = Field(1e-8, gt=0)
    """AdamW's epsilon."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's decoupled weight decay; norms and biases are left out."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are scaled down to this global norm."""
    epochs: int = Field(1, ge=1, le=1000)
    """Passes over the answers of a step."""
    minibatches: int = Field(1, ge=1, le=REQUESTS)
    """Updates per pass."""
    micro_tokens: int = Field(16384, ge=1, le=TOKENS)
    """Tokens in one packed forward and backward pass; a longer answer runs alone."""
    activation_checkpointing: bool = False
    """Recompute layers in the backward pass: less memory, about a third more time."""
    optimizer_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of AdamW's two moments (never below that of float64 weights). bfloat16 takes half as much and
    is rounded by chance so that small changes count on average."""
    master_weights: bool = True
    """Keep a float32 copy of bfloat16 weights, so that small updates are not lost to rounding."""
    clip_low: float | None = Field(None, ge=0)
    """The probability ratio is clipped at 1 - clip_low."""
    clip_high: float | None = Field(None, ge=0)
    """The probability ratio is clipped at 1 + clip_high."""
    aggregate: Aggregate | None = None
    """How token losses become one number."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL divergence to a frozen copy of the first policy; 0 keeps no copy."""
    is_cap: float | None = Field(2.0, gt=0)
    """Truncated importance weights for the difference between engine and learner; `null` turns them off."""
    dynamic_sampling: bool | None = None
    """Replace groups whose answers all have the same reward by new prompts."""
    dynamic_sampling_rounds: int = Field(3, ge=1, le=1000)
    """Most rollouts per step that dynamic sampling may take."""
    overlong_buffer: int | None = Field(None, ge=0, le=TOKENS)
    """Answers that enter the last this many tokens before max_tokens are punished linearly; 0 turns it off."""
    overlong_penalty: float = Field(1.0, ge=0)
    """The punishment at max_tokens."""
    max_bad_updates: int = Field(3, ge=1, le=COUNT)
    """Updates in a row with a loss or gradient that is not finite before the run stops."""


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
    """Answers written to samples.jsonl per step."""


class Config(Section):
    seed: int = Field(0, ge=0, lt=2**63)
    """Everything random is a function of this number."""
    steps: int = Field(100, ge=1, le=COUNT)
    """RL steps: each is a rollout, its rewards and an update."""
    run_dir: Name | None = None
    """Directory of the run; `null` makes a new one under runs/."""
    model: ModelConfig = ModelConfig()
    """The policy: which model, how exact, and where it runs."""
    task: TaskConfig = TaskConfig()
    """Where prompts come from."""
    reward: RewardConfig = RewardConfig()
    """What answers are worth, and how that is found out."""
    rollout: RolloutConfig = RolloutConfig()
    """How answers are written: how many, how they are drawn, and what the engine may use."""
    speculation: SpeculationConfig = SpeculationConfig()
    """Guessing ahead, which changes how fast tokens come and not which."""
    spot: SpotConfig = SpotConfig()
    """Training the drafter during a run, best where workers would have stood still."""
    cluster: ClusterConfig = ClusterConfig()
    """How many workers there are, what they run on, and what happens when one is lost."""
    learn: LearnConfig = LearnConfig()
    """The update: algorithm, optimizer and how the batch is cut."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """How often the run is saved, and how much of that is kept."""
    log: LogConfig = LogConfig()
    """Where metrics and answers are written, besides `metrics.jsonl`."""


def load_config(recipe: str | None = None, overrides: list[str] | None = None) -> Config:
    """Read a recipe (a file, or the name of one that ships with Paceline), apply overrides, validate. Without a recipe
    it is `default` for the embedded model, and none for any other."""
    name = choose_recipe(recipe, overrides)
    path = _find_recipe(name) if name else None
    values = read_settings(path) if path else {}
    overridden: set[str] = set()
    for text in overrides or []:
        key, eq, raw = text.partition("=")
        if not eq or not key:
            shown = reading.shorten(text)
            raise UserError(f"'{shown}' is not an override: write it as key.sub=value, for example rollout.samples=4")
        where = f"the value of '{reading.shorten(key)}' on the command line"
        value = reading.parse_yaml(raw, where)
        _check_keys(value, where)
        _put(values, key, value)
        overridden.add(key)
    return build_config(values, where=str(path or "the settings"), overridden=overridden)


def choose_recipe(recipe: str | None = None, overrides: list[str] | None = None) -> str | None:
    """The recipe that settings build on. The default one is made for the embedded model: its learning rate and its
    penalty on long answers would spoil any other."""
    if recipe:
        return recipe
    model: Any = EMBEDDED_NAME
    for text in overrides or []:
        key, _, raw = text.partition("=")
        if key not in ("model", "model.path"):
            continue
        value = reading.parse_yaml(raw, f"the value of '{key}' on the command line")
        if key == "model.path":
            model = value
        elif isinstance(value, dict):
            model = value.get("path", EMBEDDED_NAME)
    return DEFAULT_RECIPE if model == EMBEDDED_NAME else None


def describe_recipe(recipe: str | None = None, overrides: list[str] | None = None) -> str:
    """What is said at the start."""
    name = choose_recipe(recipe, overrides)
    if name is None:
        return "settings: the defaults, no recipe"
    about = " (the embedded reasoner on Countdown)" if name == DEFAULT_RECIPE else ""
    return f"settings: the recipe {name}{about}"


def build_config(values: dict[str, Any], where: str, overridden: set[str] | None = None) -> Config:
    try:
        return Config.model_validate(values)
    except ValidationError as err:
        raise UserError(_explain(err, where, overridden or set())) from err


def config_from(settings: Mapping[str, Any], where: str, recipe: str | None = None) -> Config:
    """A config from settings by their dotted names, on top of a recipe if one is named."""
    values = read_settings(_find_recipe(recipe)) if recipe else {}
    for key, value in settings.items():
        if not isinstance(key, str):
            raise UserError(f"{where} sets {reading.shorten(repr(key))}, which is not the name of a setting")
        _put(values, key, value)
    return build_config(values, where, overridden=set())


def _find_recipe(recipe: str) -> Path:
    path = Path(recipe)
    shown = reading.shorten(recipe, 200)
    if path.suffix in (".yaml", ".yml"):
        if not os.path.exists(path):  # which says no, instead of raising, of names that no file can have
            raise UserError(f"no recipe at {shown}; name a .yaml file or one of: {', '.join(recipe_names())}")
        return path
    if recipe not in recipe_names():
        close = difflib.get_close_matches(recipe, recipe_names(), n=1)
        hint = f"; did you mean '{close[0]}'?" if close else f"; there are: {', '.join(recipe_names())}"
        raise UserError(f"no recipe is called '{shown}'{hint}")
    return RECIPES / f"{recipe}.yaml"


def recipe_names() -> list[str]:
    return sorted(p.stem for p in RECIPES.glob("*.yaml"))


def read_settings(path: Path) -> dict[str, Any]:
    """The settings in a YAML file, not validated yet."""
    values = reading.read_yaml(path, RECIPE_BYTES)
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UserError(f"{path} must hold settings as 'key: value', but holds a {type(values).__name__}")
    _check_keys(values, str(path))
    return values


def _check_keys(value: Any, where: str) -> None:
    for key in value if isinstance(value, dict) else ():
        if not isinstance(key, str):
            raise UserError(f"the key {reading.shorten(repr(key))} in {where} is not text; put it in quotes")
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_keys(one, where)


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    shown = reading.shorten(key)
    if not all(part.isprintable() and part for part in (*path, last)):
        raise UserError(f"'{shown}' is not the name of a setting; `paceline settings` lists them all")
    if len(path) >= DEEPEST:
        raise UserError(f"'{shown}' cannot be set: no setting has a name of {len(path) + 1} parts")
    for part in path:
        if values.get(part) is None:  # a section without entries is empty
            values[part] = {}
        values = values[part]
        if not isinstance(values, dict):
            raise UserError(f"'{shown}' cannot be set: '{reading.shorten(part)}' is a value, not a section")
    values[last] = value


def describe_settings(model: type[BaseModel] = Config, prefix: str = "") -> list[tuple[str, str, str]]:
    """(key, default, description) of every setting, in order."""
    rows = []
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            rows += describe_settings(kind, f"{prefix}{name}.")
        else:
            default = field.get_default(call_default_factory=True)
            text = "null" if default is None else str(default).lower() if isinstance(default, bool) else str(default)
            rows.append((prefix + name, text, " ".join((field.description or "").split())))
    return rows


def setting_names() -> list[str]:
    """All dotted keys of the schema, in order."""
    return [name for name, _, _ in describe_settings()]


def _explain(err: ValidationError, where: str, overridden: set[str]) -> str:
    """One sentence for the first problem, in the user's own terms."""
    first = err.errors(include_url=False, include_context=False)[0]
    key = ".".join(str(part) for part in first["loc"])
    typed = any(o == key or o.startswith(f"{key}.") or key.startswith(f"{o}.") for o in overridden)
    key = reading.shorten(key) or "the settings"
    source = "on the command line" if typed else f"in {where}"
    if first["type"] == "extra_forbidden":
        known = setting_names()
        sections = sorted({k.rpartition(".")[0] for k in known} - {""})
        # The right name in the wrong section, or else the nearest spelling.
        close = [k for k in known if k.rpartition(".")[2] == key.rpartition(".")[2]]
        close = close or difflib.get_close_matches(key, known + sections, n=1, cutoff=0.5)
        hint = f"; did you mean '{close[0]}'?" if close else "; `paceline settings` lists them all"
        return f"unknown setting '{key}' {source}{hint}"
    message = first["msg"].removeprefix("Value error, ")
    message = re.sub(r"^[A-Z]\w+ should", "it should", message)
    given = "" if first["type"] == "value_error" else f" = {reading.shorten(repr(first['input']))}"
    return f"'{key}'{given} {source} does not work: {message}"
