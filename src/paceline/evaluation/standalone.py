"""An evaluation outside of a run: workers that only decode, reward processes, and an evaluator over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from paceline.cluster.make import make_cluster
from paceline.config import Config
from paceline.evaluation.evaluator import Evaluator
from paceline.evaluation.prompts import make_eval_set, make_eval_task
from paceline.model.tokenizer import load_tokenizer
from paceline.process.stopping import Stopping
from paceline.run import Run
from paceline.setup.build import make_sampling
from paceline.setup.conversations import make_conversations
from paceline.setup.engines import read_policy_config
from paceline.setup.start import make_rewards, with_eval_rewards
from paceline.tasks.tasks import choose_style


@contextmanager
def evaluating(config: Config, folder: Path, stopping: Stopping, note: Callable[[str], None]) -> Iterator[Evaluator]:
    """An evaluator of the model that `config` names; `folder` is for logs and can be removed afterwards."""
    with ExitStack() as undo:
        tokenizer = load_tokenizer(config.model.path)
        shape = read_policy_config(config, config.model.path)
        style = choose_style(config.task.style, shape.hf, bool(tokenizer.hf.chat_template))
        task = make_eval_task(config, style)
        talks = make_conversations(config, tokenizer, style, None, 0)
        if talks:
            undo.callback(talks.close)
        pool = make_rewards(with_eval_rewards(config), task, None, folder / "rewards.log")
        undo.callback(pool.close)
        scratch = Run.create(config.model_copy(update={"run_dir": str(folder / "run")}))
        undo.callback(scratch.unlock)
        cluster = make_cluster(scratch.config, scratch, note, learns=False)
        undo.callback(cluster.close)
        facts = cluster.start()
        sampling = make_sampling(config, tokenizer.eos_ids)
        prepare = talks.prepare if talks else None
        eval_set = make_eval_set(task, tokenizer, sampling, config, facts.max_length, prepare)
        pool.ready()
        yield Evaluator(config, eval_set, pool, True, cluster, tokenizer, stopping, note, talks)
