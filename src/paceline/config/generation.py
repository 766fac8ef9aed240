"""Settings of what generates and rewards completions: model, task, reward, rollout, speculation, evaluation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from paceline.config.values import (
    COUNT,
    GIGABYTES,
    PROCESSES,
    REQUESTS,
    SECONDS,
    TOKENS,
    Name,
    Options,
    Section,
    joined_names,
)
from paceline.draft.strategy import Strategy
from paceline.errors import UserError

MAX_EVAL_SAMPLES = 2**16


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
    name: Annotated[Name, BeforeValidator(joined_names)] = "countdown"
    """`countdown`, `gym:NAME` for a reasoning-gym task, `forecast:NAME` for a daily series, `grid:screening` or
    `grid:tool` for outages of power grids, a .jsonl, .json or .parquet file (or several: a pattern, data/*.jsonl, or a
    list), `hub:OWNER/NAME` for a hub data set, or a folder laid out like one; of those two, `:CONFIGURATION` and
    `@REVISION` may follow."""
    difficulty: Name = "medium"
    """Countdown and grid: easy, medium, hard, expert; for Countdown also `tail`: mostly quick, one in 16 so hard that
    completions are long."""
    problems: int | None = Field(None, ge=1, le=COUNT)
    """Countdown only: number of distinct problems, visited in epochs; `null` never repeats one."""
    style: Literal["auto", "search", "chat", "text"] = "auto"
    """How prompts are worded that are generated, or made by `task.template`. `search` is the embedded model's own
    format, `chat` makes messages of them, `text` leaves them text; `auto` asks the model."""
    split: Name = "train"
    """Split of a hub data set or a folder, such as test, train+test or train[:1000]; train or test of a forecast or a
    grid."""
    streaming: bool = False
    """Read a hub data set or a folder row by row as the run needs it, instead of all of it before the run begins."""
    prompt_column: Name = "prompt"
    """Column of a data set that holds the prompt, as text or as messages."""
    template: Annotated[str, Field(min_length=1)] | None = None
    """The prompt, made from columns of the row: {question} is replaced by that column, {extra_info.level} by an entry
    of it, {{ and }} by single braces."""
    columns: dict[Name, Name] = Field(default_factory=dict)
    """Columns for the reward functions under other names: `{ground_truth: extra_info.answer}` passes that entry as
    ground_truth."""
    few_shot: int = Field(0, ge=0, le=1000)
    """Solved examples put before every prompt: the first rows of the data set, which are then not trained on."""
    few_shot_answer: Annotated[str, Field(min_length=1)] = "{answer}"
    """The answer of such an example, made from its columns like `template`."""
    system: Annotated[str, Field(min_length=1)] | None = None
    """A system message put before prompts that are messages."""
    chat_template_kwargs: Options = Field(default_factory=dict)
    """Variables for the model's chat template, such as {enable_thinking: false}."""
    options: Options = Field(default_factory=dict)
    """Keyword arguments of the reasoning-gym task; of a forecast: window, test_from, decimals, day_column,
    value_column; of a grid: case, candidates."""
    shuffle: bool = True
    """Visit the samples of a data set in an order drawn from the seed, anew in every epoch; of one that is streamed,
    the next 1,000 at a time."""
    max_prompt_tokens: int | None = Field(None, ge=1, le=TOKENS)
    """Most tokens of a prompt; `null` allows what fits into the model's context."""
    overlong_prompts: Literal["leave_out", "left", "right", "middle", "error"] = "leave_out"
    """What becomes of longer ones: `leave_out` takes their rows out of the data, with a count at the start; `left`,
    `right` and `middle` cut tokens there (verl's data.truncation); `error` names the first and stops."""


class RewardFunctionConfig(Section):
    function: Name
    """`countdown`, `exact_match`, `math`, `gym`, `forecast`, `grid`, `environment` for what the environment gives,
    `data_source` for verl's scoring of known data sets, or your own as `module:function` or `file.py:function`."""
    weight: float = 1.0
    """Factor of its value in the sum that is the completion's reward."""
    per: Literal["completion", "group", "arrived"] | None = None
    """What it is given in one call: a completion as soon as it is finished, all of a prompt's group once they are, or
    what has arrived when a process is free; `null` is as the function asks for, or as its signature means."""


class RewardConfig(Section):
    functions: list[RewardFunctionConfig] = Field(default_factory=list)
    """The reward functions; empty means the task's own."""
    workers: int = Field(1, ge=0, le=PROCESSES)
    """Processes that compute rewards while decoding goes on. 0 computes them in the trainer, where nothing can stop a
    hanging one."""
    timeout_s: float = Field(30.0, gt=0, le=SECONDS)
    """Seconds that one call may take for each of its completions."""
    start_timeout_s: float = Field(120.0, gt=0, le=SECONDS)
    """Seconds that importing the functions may take."""
    on_error: Literal["stop", "value"] = "stop"
    """A reward that raises, hangs or returns NaN: `stop` the run after saving, or count it as `error_value`."""
    error_value: float = 0.0
    """Reward of a completion whose reward function failed, with `on_error=value`."""


class RolloutConfig(Section):
    prompts: int = Field(16, ge=1, le=REQUESTS)
    """Prompts per step."""
    samples: int = Field(8, ge=1, le=REQUESTS)
    """Completions per prompt: the group size."""
    temperature: float = Field(1.0, ge=0)
    """Softmax temperature; 0 is greedy."""
    top_k: int = Field(0, ge=0, le=TOKENS)
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Keep the smallest set of tokens whose probability reaches this."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Keep tokens at least this likely relative to the most likely one."""
    max_tokens: int = Field(512, ge=1, le=TOKENS)
    """Most tokens of a completion."""
    min_tokens: int = Field(0, ge=0, le=TOKENS)
    """Stop tokens cannot be drawn before a completion has this many tokens."""
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """Strings that end a completion."""
    max_batch: int = Field(256, ge=1, le=REQUESTS)
    """Most requests that decode at the same time (vLLM's max_num_seqs)."""
    page_size: int | None = Field(None, ge=1, le=TOKENS)
    """Tokens per KV page; `null` is 64 on a GPU and 256 on a CPU, which reads whole pages (1024 for one request)."""
    kv_memory_gb: float | None = Field(None, gt=0, le=GIGABYTES)
    """Memory for KV pages; `null` takes what the batch can use, up to 2 GB on a CPU, and on a GPU up to half of it and
    to what everything else leaves (`paceline plan` shows it)."""
    prefill_tokens: int = Field(8192, ge=1, le=TOKENS)
    """Most prompt tokens of one prefill pass; a longer prompt runs alone."""
    write_ahead: bool = False
    """With several workers: those that have run dry begin the next step's requests with the present policy. The next
    policy verifies what they wrote and keeps what it would have written itself, so no token changes. Off because it was
    measured to pay on some runs and not on others (docs/workers.md)."""
    cuda_graphs: bool = True
    """Replay captured graphs for decoding on CUDA."""
    engine: Name = "paceline"
    """What generates completions: `paceline`, or `vllm` for families of models that Paceline does not run; those are
    learned as transformers has them."""
    vllm: Options = Field(default_factory=dict)
    """Arguments of vLLM's engine by their names there, with `engine=vllm`: {tensor_parallel_size: 2,
    gpu_memory_utilization: 0.5, enable_sleep_mode: false}."""
    vllm_python: Name | None = None
    """A Python of another environment that has vLLM and Paceline, where they get in the way of what is here; `null` is
    this one."""

    @model_validator(mode="after")
    def _lengths(self) -> RolloutConfig:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) is larger than max_tokens ({self.max_tokens})")
        if self.engine == "paceline" and self.vllm:
            raise ValueError("vllm has arguments for vLLM, which runs only with engine=vllm")
        if self.engine != "paceline" and self.write_ahead:
            raise ValueError(f"write_ahead=true works with Paceline's own engine only, but engine={self.engine}")
        if self.prompts * self.samples > REQUESTS:
            raise ValueError(
                f"prompts ({self.prompts}) times samples ({self.samples}) is more than {REQUESTS:,} answers per step"
            )
        return self


class SpeculationConfig(Section):
    mode: Literal["adaptive", "plain"] = "adaptive"
    """`adaptive` decodes speculatively where that is faster, `plain` never does; the tokens are the same."""
    drafter: Name | None = "auto"
    """Folder of a neural drafter, of Paceline's own or in the EAGLE-3 form of vLLM, SGLang or speculators; `auto` takes
    the one in the model's own folder, if there is one; `new` begins with an untrained one; `none` uses none."""
    suffix: bool = True
    """Draft by suffix match: what followed the same tokens earlier in the completion or in others to its prompt."""
    suffix_mb: float = Field(64, gt=0, le=1000 * GIGABYTES)
    """Memory of the suffix drafter for earlier completions."""
    strategies: list[str] | None = None
    """Strategies that the tuner chooses from, as drafter:depth[xwidth][/nodes], for example [suffix:8, neural:5];
    `null` is a set for the drafters that there are."""
    explore: float = Field(0.02, ge=0, le=0.5)
    """Most of the rollout time that may go to trials of strategies that are not the best known, as a share."""
    graph_memory_gb: float | None = Field(None, gt=0, le=GIGABYTES)
    """Most GPU memory for captured CUDA graphs; what comes after runs without one."""

    @field_validator("strategies")
    @classmethod
    def _strategies(cls, strategies: list[str] | None) -> list[str] | None:
        try:
            for strategy in strategies or []:
                Strategy.parse(strategy)
        except UserError as err:
            raise ValueError(str(err)) from err
        return strategies


class EvalConfig(Section):
    task: Name | None = None
    """Prompts that the policy is evaluated on, written as `task.name` is: a task, a file or a hub data set. `null`
    evaluates nothing."""
    task_settings: Options = Field(default_factory=dict)
    """Settings of that task that differ from those under `task`, by their names there, for example {split: test} or
    {difficulty: hard}."""
    every: int = Field(10, ge=0, le=COUNT)
    """Steps between evaluations, besides one before the first step and one after the last; 0 makes only those two."""
    before_training: bool = True
    """Evaluate before the first step too, as what later evaluations are compared with."""
    prompts: int | None = Field(None, ge=1, le=REQUESTS)
    """Evaluation prompts, of a data set in an order drawn from `eval.seed`; `null` takes all of a data set, and 256 of
    a task that generates its own."""
    samples: int = Field(1, ge=1, le=MAX_EVAL_SAMPLES)
    """Sampled completions per evaluation prompt."""
    greedy: bool = False
    """Also write one greedy completion per evaluation prompt, which is reported by itself."""
    temperature: float | None = Field(None, ge=0)
    """Softmax temperature of evaluation; `null` is that of the rollout, 0 is greedy. top_k, top_p, min_p and stop
    strings are those of the rollout."""
    max_tokens: int | None = Field(None, ge=1, le=TOKENS)
    """Most tokens of an evaluation's completion; `null` is `rollout.max_tokens`."""
    k: list[Annotated[int, Field(ge=1, le=MAX_EVAL_SAMPLES)]] | None = None
    """The k of pass@k and best@k, each at most `samples`; `null` is 1, 2, 4 and so on up to `samples`."""
    pass_reward: float = 1.0
    """A completion passes if its reward is at least this."""
    functions: list[RewardFunctionConfig] = Field(default_factory=list)
    """Reward functions of evaluation; empty means those of `reward.functions`, or else the evaluation task's own."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Draws the evaluation's prompts, where they are generated, and its noise. It does not depend on the run's `seed`
    or on the step, so that checkpoints of all runs are compared on equal dice."""
    best: Name | None = "mean"
    """Which number makes a checkpoint the best one, which is kept: `mean` reward, `pass@K`, `best@K`, `greedy`, or the
    name of a reward function; `null` keeps none."""

    @field_validator("k")
    @classmethod
    def _in_order(cls, k: list[int] | None) -> list[int] | None:
        if k is not None and not k:
            raise ValueError("it should name at least one k, or be null")
        return sorted(set(k)) if k else k

    @model_validator(mode="after")
    def _samples(self) -> EvalConfig:
        if self.temperature == 0 and self.samples > 1:
            raise ValueError(
                f"temperature=0 is greedy, so all {self.samples} samples would be the same; set samples=1, "
                "or greedy=true beside a temperature above 0"
            )
        if self.k and self.k[-1] > self.samples:
            raise ValueError(f"k={self.k[-1]} needs at least as many samples, but samples={self.samples}")
        return self

    @property
    def ks(self) -> list[int]:
        """The k of pass@k, in order."""
        if self.k:
            return self.k
        powers = [2**i for i in range(self.samples.bit_length())]
        return sorted({*powers, self.samples})
