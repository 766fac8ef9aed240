"""From settings to conversations: the processes of environments and tools, and the chat template that shows them."""

from __future__ import annotations

from pathlib import Path

from paceline.config import Config
from paceline.errors import UserError
from paceline.model.tokenizer import Tokenizer
from paceline.run.turns import TurnFile
from paceline.setup.engines import is_own
from paceline.tasks.environments.calls import family_of
from paceline.tasks.environments.chat import Chat
from paceline.tasks.environments.conversations import Conversations
from paceline.tasks.environments.messages import ToolboxSpec
from paceline.tasks.environments.pool import EnvironmentPool
from paceline.tasks.environments.records import TurnRecords


def make_conversations(
    config: Config, tokenizer: Tokenizer, style: str, folder: Path | None, done: int
) -> Conversations | None:
    """None where completions have no turns. What is returned is recorded in a run's `folder`, whose steps up to `done`
    are not made again."""
    e = config.environment
    if not e.acts:
        return None
    if not is_own(config):
        raise UserError(
            "tools and environments (environment.*) need Paceline's own engine, which goes on behind an observation, "
            f"but rollout.engine={config.rollout.engine}"
        )
    template = tokenizer.hf.chat_template if isinstance(tokenizer.hf.chat_template, str) else None
    family = family_of(template)
    spec = ToolboxSpec(e.name, e.options, tuple(e.tools), tuple(e.mcp), family, e.max_chars, e.start_timeout_s)
    pool = EnvironmentPool(spec, e.workers, e.timeout_s, folder / "environment.log" if folder else None)
    try:
        imported = pool.ready()
        chat = Chat(tokenizer, imported.schemas, describe=style != "search")
        log = TurnFile(folder, done) if folder and e.log_turns else None
        return Conversations(pool, chat, TurnRecords(log), e.max_turns, e.on_error == "end")
    except BaseException:
        pool.close()
        raise
