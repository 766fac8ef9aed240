"""Settings of conversations: environments, tools, and what they may take."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from paceline.config.values import PROCESSES, SECONDS, TOKENS, Name, Options, Section

MAX_TURNS = 10_000


class EnvironmentConfig(Section):
    name: Name | None = None
    """What answers the policy's turns: `grid`, or your own class or function that makes an environment, as
    `file.py:name` or `module:name`; `null` for none."""
    options: Options = Field(default_factory=dict)
    """Keyword arguments of that environment."""
    tools: list[Name] = Field(default_factory=list)
    """Python functions that the model may call, as `file.py:function` or `module:function`; their signatures and
    docstrings are what it is told of them."""
    mcp: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """Commands that start MCP servers, whose tools the model may call (they talk over stdin and stdout)."""
    max_turns: int = Field(8, ge=1, le=MAX_TURNS)
    """Most turns of a completion; what the last one calls is not run."""
    max_chars: int = Field(8000, ge=1, le=TOKENS)
    """Most characters of an observation that the model is shown."""
    workers: int = Field(2, ge=1, le=PROCESSES)
    """Processes that environments and tools run in, each many at a time."""
    timeout_s: float = Field(30.0, gt=0, le=SECONDS)
    """Seconds that a turn may take in them: after that the model is told so."""
    start_timeout_s: float = Field(120.0, gt=0, le=SECONDS)
    """Seconds that importing them may take, and starting MCP servers."""
    on_error: Literal["tell", "end"] = "tell"
    """What a tool or a step that raises, hangs or ends its process leads to: the model is told, or the completion
    ends."""
    credit: Literal["outcome", "turn"] = "outcome"
    """What a turn is credited with: the reward of the whole, or only what came from it on: its own reward and those of
    the turns behind it, and what reward functions gave."""
    log_turns: bool = True
    """Record what was returned in turns.jsonl, so that a resumed run sees the same."""

    @property
    def acts(self) -> bool:
        """Whether completions have turns."""
        return bool(self.name or self.tools or self.mcp)
