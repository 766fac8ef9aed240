"""What a tuner knows, as a checkpoint keeps it: the shape that it must have to be gone on with."""

from __future__ import annotations

from typing import Annotated, NotRequired

from pydantic import AfterValidator, ConfigDict, Field
from typing_extensions import TypedDict

from paceline.draft.strategy import MAX_NODES, Strategy
from paceline.errors import UserError

Count = Annotated[int, Field(ge=0, le=2**62)]
Seconds = Annotated[float, Field(ge=0, le=1e12)]
Durations = Annotated[list[Seconds], Field(max_length=1000)]
Weights = Annotated[list[Annotated[float, Field(ge=0, le=1e12)]], Field(max_length=MAX_NODES)]
Rates = Annotated[list[Annotated[float, Field(ge=0, le=1.001)]], Field(max_length=2**20)]  # sums round
STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


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
    seconds: Durations


class RatesState(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    batch: Count
    unseen: Count
    rates: Annotated[Rates, Field(min_length=1)]


class CrowdState(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    together: Annotated[float, Field(ge=0, le=1.001)]
    rates: list[RatesState]


class AcceptanceState(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    reached: Weights
    held: Weights
    rate: Rates
    best: Rates
    round: Count
    usually_reached: NotRequired[Weights]
    usually_held: NotRequired[Weights]


def _as_long(state: AcceptanceState) -> AcceptanceState:
    """All lists are by depth."""
    lengths = {len(column) for column in state.values() if isinstance(column, list)}
    if len(lengths) > 1:
        raise ValueError(f"its lists have {', '.join(map(str, sorted(lengths)))} depths; they should have as many")
    return state


class TunerState(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    round: Count
    seconds: Seconds
    explored: Seconds
    allowed: NotRequired[Seconds]
    costs: list[CostState]
    catch_ups: NotRequired[list[CatchUpState]]
    crowd: NotRequired[CrowdState]
    acceptance: dict[str, Annotated[AcceptanceState, AfterValidator(_as_long)]]
