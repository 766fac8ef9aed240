"""The prompts of an evaluation, and the requests that are made of them.

The noise of a request is a function of its seed, its id and the position. Answer j to prompt i always has the same id,
whatever the step, the number of samples or the policy: that is what makes dice equal.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from paceline.config import Config, TaskConfig
from paceline.config.describe import explain
from paceline.core import Group, Request, Sample, SamplingParams, mix_seed
from paceline.errors import UserError
from paceline.tasks import Task, make_task

if TYPE_CHECKING:
    from paceline.model.tokenizer import Tokenizer

FIRST_ID = 2**61  # ids of evaluation requests begin here, far above those of training
STRIDE = (
    2**20
)  # ids per prompt: more than anybody samples, so that an answer's id does not depend on how many there are
GREEDY_ANSWER = STRIDE - 1  # the number of the greedy answer among those to its prompt
GENERATED_PROMPTS = 256  # of a task that generates as many as are asked for


def eval_task_config(config: Config) -> TaskConfig:
    """The settings of the evaluation's task: those of `task`, with the differences that `eval` names."""
    assert config.eval.task is not None, "there is something to evaluate on"
    same = config.task.model_dump()
    changes = dict(config.eval.task_settings)
    if "name" in changes:
        raise UserError("eval.task_settings names another task: give its name as eval.task")
    # No epochs: each prompt once. Of a data set in an order drawn from the seed, so that the first ones are any ones.
    values = same | {"problems": None, "shuffle": True} | changes | {"name": config.eval.task}
    try:
        return TaskConfig.model_validate(values)
    except ValidationError as err:
        raise UserError(explain(err, "eval.task_settings", set())) from err


def make_eval_task(config: Config, style: str) -> Task:
    """`style` is how the run's own prompts are worded, which are the policy's."""
    settings = eval_task_config(config)
    seed = mix_seed(config.eval.seed, "evaluation")
    try:
        return make_task(settings, seed, settings.style if settings.style != "auto" else style)  # type: ignore[arg-type]
    except UserError as err:
        raise UserError(f"eval.task: {err}") from err


@dataclass
class EvalSet:
    """Groups and requests of an evaluation, the same every time."""

    task: Task
    groups: list[Group]
    """Of the prompts, without completions."""
    data: list[str]
    """The data set that each belongs to."""
    sampling: SamplingParams
    samples: int
    greedy: bool
    seed: int
    left_out: list[str]
    """Prompts that the model has no room for, as messages name them."""
    acts: bool = False
    """Whether completions have turns."""

    def fresh(self) -> list[Group]:
        """Groups to be filled."""
        return [Group(group.sample, group.prompt) for group in self.groups]

    @property
    def answers(self) -> int:
        """To each prompt, the greedy one included."""
        return self.samples + self.greedy

    def requests(self) -> list[Request]:
        answers = [(j, self.sampling) for j in range(self.samples)]
        if self.greedy:
            answers.append((GREEDY_ANSWER, replace(self.sampling, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)))
        return [
            Request(FIRST_ID + group.sample.index * STRIDE + j, group.prompt, sampling, self.seed, self.acts)
            for group in self.groups
            for j, sampling in answers
        ]

    @property
    def fingerprint(self) -> str:
        """Two evaluations with the same one were made on the same prompts with the same dice."""
        how = {**asdict(self.sampling), "samples": self.samples, "greedy": self.greedy, "seed": self.seed}
        digest = hashlib.blake2b(json.dumps(how, sort_keys=True).encode(), digest_size=12)
        for group in self.groups:
            digest.update(json.dumps([group.sample.index, group.prompt]).encode())
        return digest.hexdigest()


def index_of(request_id: int) -> int:
    """The prompt that an evaluation request belongs to."""
    return (request_id - FIRST_ID) // STRIDE


def is_greedy(request_id: int) -> bool:
    return (request_id - FIRST_ID) % STRIDE == GREEDY_ANSWER


def decided_eval(config: Config) -> dict[str, Any]:
    """What the settings of evaluation leave open, as the rollout has it."""
    e = config.eval
    temperature = config.rollout.temperature if e.temperature is None else e.temperature
    if temperature == 0 and e.samples > 1:
        raise UserError(
            f"eval.samples = {e.samples}, but at rollout.temperature=0 all of them would be the same; set "
            "eval.temperature above 0, or eval.samples=1"
        )
    return {"temperature": temperature, "max_tokens": e.max_tokens or config.rollout.max_tokens, "k": e.ks}


def eval_sampling(config: Config, run_sampling: SamplingParams) -> SamplingParams:
    decided = decided_eval(config)
    most = decided["max_tokens"]
    min_tokens = min(run_sampling.min_tokens, most)
    return replace(run_sampling, temperature=decided["temperature"], max_tokens=most, min_tokens=min_tokens)


def make_eval_set(
    task: Task,
    tokenizer: Tokenizer,
    run_sampling: SamplingParams,
    config: Config,
    max_length: int,
    prepare: Callable[[Sample], Sample] | None = None,
) -> EvalSet:
    """`max_length` is the engine's: tokens of prompt and completion. Prompts that leave no room for an answer are left
    out, which the set says. `prepare` has an environment make the prompt, where completions have turns."""
    sampling = eval_sampling(config, run_sampling)
    groups: list[Group] = []
    left_out: list[str] = []
    for index in range(_count(task, config)):
        sample = task.sample(index)
        sample = prepare(sample) if prepare else sample
        prompt = tuple(tokenizer.encode_prompt(sample.prompt, sample.where))
        if 0 < len(prompt) < max_length:
            groups.append(Group(sample, prompt))
        else:
            left_out.append(f"{sample.where}, {len(prompt)} tokens")
    if not groups:
        raise UserError(
            f"no evaluation prompt of {task.name} fits into the model's context of {max_length} tokens, "
            f"beginning with {left_out[0]}"
        )
    e = config.eval
    data = [_data_of(group, task.name) for group in groups]
    return EvalSet(task, groups, data, sampling, e.samples, e.greedy, e.seed, left_out, prepare is not None)


def _count(task: Task, config: Config) -> int:
    """Of a task that ends, at most as many prompts as it has."""
    order = getattr(task, "order", None)
    whole = order.count if order is not None else None
    wanted = config.eval.prompts
    if whole is None:
        return wanted or GENERATED_PROMPTS
    return min(whole, wanted or whole)


def _data_of(group: Group, task: str) -> str:
    """verl's `data_source` where rows have it, else the task's own name, short."""
    source = group.sample.columns.get("data_source")
    if isinstance(source, str) and source:
        return source
    if task.endswith((".jsonl", ".json", ".parquet")):
        return Path(task).stem
    return task.removeprefix("hub:").removeprefix("gym:")
