"""A tuner's state in a checkpoint: the schema that it must have to be restored. Parts that only older versions wrote
are ignored."""

from __future__ import annotations

from typing import Annotated, Any, NotRequired

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field
from typing_extensions import TypedDict

from paceline.draft.strategy import MAX_TREE_NODES, Strategy
from paceline.errors import UserError

Count = Annotated[int, Field(ge=0, le=2**62)]
Seconds = Annotated[float, Field(ge=0, le=1e12)]
Share = Annotated[float, Field(ge=0, le=1)]
Durations = Annotated[list[Seconds], Field(max_length=1000)]
Weights = Annotated[list[Annotated[float, Field(ge=0, le=1e12)]], Field(max_length=MAX_TREE_NODES)]
STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
LENIENT = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
RENAMED = {"held": "accepted", "usually_reached": "usual_reached", "usually_held": "usual_accepted"}


def renamed(acceptance: Any) -> Any:
    """A family's acceptance with the names and lists of this version, whichever version wrote it."""
    if not isinstance(acceptance, dict):
        return acceptance
    state = {RENAMED.get(name, name): value for name, value in acceptance.items()}
    for name in ("reached", "accepted"):
        if name in state:
            state.setdefault(f"usual_{name}", state[name])
    return {name: value for name, value in state.items() if name in AcceptanceState.__annotations__}


def _known(text: str) -> str:
    try:
        Strategy.parse(text)
    except UserError as err:
        raise ValueError(str(err)) from err
    return text


class CostState(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    strategy: Annotated[str, AfterValidator(_known)]
    batch: Count
    round: Annotated[int, Field(ge=-1, le=2**62)]
    seconds: Durations


class CatchUpState(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    drafter: str
    batch: Count
    seconds: Annotated[Durations, Field(min_length=1)]


class AcceptanceState(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    reached: Weights
    accepted: Weights
    usual_reached: Weights
    usual_accepted: Weights
    round: Count


class RatioState(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    batch: Count
    ratio: Share


class StragglersState(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    together: Share
    gain: NotRequired[Share]
    ratios: list[RatioState]


def _as_long(state: AcceptanceState) -> AcceptanceState:
    """All lists are by depth."""
    lengths = {len(column) for column in state.values() if isinstance(column, list)}
    if len(lengths) > 1:
        raise ValueError(f"its lists have {', '.join(map(str, sorted(lengths)))} depths; they should have as many")
    return state


class TunerState(TypedDict):
    __pydantic_config__ = LENIENT  # type: ignore[misc]
    round: Count
    seconds: Seconds
    explored: Seconds
    costs: list[CostState]
    catch_ups: NotRequired[list[CatchUpState]]
    acceptance: dict[str, Annotated[AcceptanceState, BeforeValidator(renamed), AfterValidator(_as_long)]]
    stragglers: NotRequired[StragglersState]
    trial_due: NotRequired[dict[str, Seconds]]
    best: NotRequired[Annotated[str, AfterValidator(_known)]]
