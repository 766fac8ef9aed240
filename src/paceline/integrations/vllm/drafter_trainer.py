"""Beside a running vLLM engine: its drafter learns from the answers that it finishes, and better versions take its
place while requests run.

    from paceline.integrations.vllm.cold_start import speculation
    from paceline.integrations.vllm.drafter_trainer import DrafterTrainer

    llm = LLM(model, **speculation(model, "drafter"))
    trainer = DrafterTrainer(llm).attach()

See docs/vllm.md.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from paceline.config.training import SpotConfig
from paceline.errors import RunError, UserError
from paceline.files.reading import check
from paceline.integrations.vllm.drafter_folder import NAME, DrafterFolder
from paceline.integrations.vllm.internals import engine_of, facts_of, is_asleep
from paceline.integrations.vllm.local_training import LocalTraining
from paceline.integrations.vllm.messages import Activity, NewVersion, When
from paceline.integrations.vllm.plan import FollowPlan
from paceline.integrations.vllm.side_car import SideCarTraining, side_car_threads
from paceline.integrations.vllm.swap import LOADED_FROM, Swap, refuse_other_shape
from paceline.integrations.vllm.training import Training
from paceline.model.checkpoint import find_model
from paceline.spot.overlap import TAIL_DIVISOR

Where = Literal["here", "thread", "process"]
BUSY_SHARE = 0.1  # of the time that the engine is busy, which training may take besides
DEADLINE_S = 300.0
LOG = "side-car.log"


def tell(sentence: str) -> None:
    print(f"paceline: {sentence}", file=sys.stderr, flush=True)


class DrafterTrainer:
    def __init__(
        self,
        llm: Any,
        *,
        folder: str | Path | None = None,
        policy: str | Path | None = None,
        where: Where = "here",
        when: When = "idle",
        share: float = BUSY_SHARE,
        device: str = "auto",
        settings: Mapping[str, Any] | None = None,
        seed: int = 0,
        deadline_s: float = DEADLINE_S,
        report: Callable[[str], None] = tell,
    ):
        """`llm` is an `LLM` or `LLMEngine` that was started with `speculation`. `policy` is the folder or hub id of its
        model, by default the one that it was started with; `folder` keeps the versions, by default where it drafts
        from. Training goes on `here` between the engine's calls, in a `thread`, or in a `process` of its own, on
        `device`; `when` says what the engine may be doing meanwhile, and `share` how much of its busy time may go into
        training besides (not for a process). `settings` are those of `spot`, such as {"buffer_mb": 512}. `report` gets
        one sentence for whatever is worth telling."""
        facts = facts_of(llm)
        spot = dict(settings or {})
        check(SpotConfig, spot, "DrafterTrainer(settings=...)")
        if not 0 <= share <= 1:
            raise UserError(f"share={share} is not a share of the time: it must lie between 0 and 1")
        started_with = find_model(facts.drafter)
        place = _place(started_with, folder)
        drafter = Path(llm.collective_rpc(LOADED_FROM)[0])  # another trainer may have exchanged it
        named = NAME.fullmatch(drafter.name)
        version = int(named[1]) if named else 0
        plan = FollowPlan(
            str(policy or facts.policy),
            drafter,
            started_with,
            place.folder,
            facts.dtype if facts.dtype in ("float32", "float64") else "bfloat16",
            facts.device if device == "auto" else device,
            spot,
            seed,
            _is_warm(place, version),
            version,
            side_car_threads() if where == "process" and facts.device == "cpu" else 0,
        )
        self.llm = llm
        self.place = place
        self.training = _make_training(plan, where, when, share, report, deadline_s)
        self._share = share if where == "here" else 0.0  # a thread takes it by itself
        self._started_with = started_with
        self._swap = Swap(llm, place, drafter, version, report, deadline_s)
        self._report = report
        self._activity = _ActivityOf(engine_of(llm))
        self._engine_step: Callable[[], Any] | None = None
        self._waiting: NewVersion | None = None  # for an engine that is asleep

    @property
    def version(self) -> int:
        """Of the drafter that the engine has."""
        return self._swap.version

    @property
    def versions(self) -> list[dict[str, Any]]:
        """What `versions.jsonl` says: what was evaluated, and what the engine has taken."""
        return self.place.rows()

    def attach(self) -> DrafterTrainer:
        """From now on the engine's own steps feed the training, and bring the engine what comes of it: nothing else
        needs to be called."""
        engine = engine_of(self.llm)
        if self._engine_step is None:
            self._engine_step = engine.step
            engine.step = self._step
        return self

    def detach(self) -> None:
        if self._engine_step is not None:
            del engine_of(self.llm).step  # the class's own again
            self._engine_step = None

    def _step(self) -> Any:
        assert self._engine_step is not None
        outputs = self._engine_step()
        self.observe(outputs)
        activity, busy_s = self._activity.look()
        if activity is not None:
            self.training.activity(activity)
        if busy_s and self._share:  # the engine has just run dry
            self.training.train(self._share * busy_s)
        self.exchange()
        return outputs

    def observe(self, outputs: Iterable[Any]) -> None:
        """Learn from what is finished among these `RequestOutput`s; for engines that are not attached."""
        done = [
            (list(output.prompt_token_ids), list(answer.token_ids))
            for output in outputs
            if output.finished and output.prompt_token_ids and getattr(output, "lora_request", None) is None
            for answer in getattr(output, "outputs", [])
            if len(answer.token_ids) > 0
        ]
        if done:
            self.training.answers(done)

    def train(self, seconds: float) -> int:
        """Train for so long now, and give the engine what came of it -> the version that it has."""
        self.training.train(seconds)
        return self.exchange()

    def exchange(self) -> int:
        """Give the engine the newest version, if it does not have it -> the version that it has. Between two steps of
        the engine, in its own thread; one that is asleep gets it when it is awake."""
        self._waiting = self.training.poll() or self._waiting
        if self._waiting is not None and not is_asleep(self.llm):
            new = self._waiting
            self._waiting = None
            self._swap.to(new)
        return self.version

    def reload(self) -> None:
        """Load the drafter again that the engine should have: after a sleep that has discarded the weights."""
        self._swap.again()

    def policy_updated(self, weights: Mapping[str, Tensor] | str | Path) -> None:
        """The engine's policy has other weights now: a checkpoint's folder, or tensors by their Hugging Face names."""
        try:
            self.training.policy_updated(weights if isinstance(weights, Mapping) else find_model(str(weights)))
        except RunError as err:
            self._report(f"{err}; the drafter's training goes on with the policy that it has")
        self.exchange()

    def offer(self, folder: str | Path) -> int:
        """A drafter from elsewhere takes the place of this one if it is not worse on held-out answers -> the version
        that the engine has. A UserError says why it does not."""
        refuse_other_shape(Path(folder), self._started_with)
        self.training.offer(Path(folder))
        return self.exchange()

    def close(self) -> None:
        """End training; the engine keeps the drafter that it has."""
        self.detach()
        self.training.close()

    def __enter__(self) -> DrafterTrainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _ActivityOf:
    """What the engine is doing, by the number of its unfinished requests."""

    def __init__(self, engine: Any):
        self._engine = engine
        self._peak = 0  # since it was idle
        self._since = 0.0
        self._last: Activity = "idle"

    def look(self) -> tuple[Activity | None, float]:
        """What it does now, if that is new; and if it has just run dry, how many seconds it was busy."""
        left = self._engine.get_num_unfinished_requests()
        now: Activity = "idle" if left == 0 else "tail" if left * TAIL_DIVISOR <= self._peak else "busy"
        busy_s = time.monotonic() - self._since if left == 0 and self._peak else 0.0
        if left and not self._peak:
            self._since = time.monotonic()
        self._peak = max(self._peak, left) if left else 0
        changed = now != self._last
        self._last = now
        return (now if changed else None), busy_s


def _place(started_with: Path, folder: str | Path | None) -> DrafterFolder:
    if folder is not None:
        return DrafterFolder(Path(folder).resolve())
    if NAME.fullmatch(started_with.name) is None:
        raise UserError(
            f"vLLM drafts from {started_with}, which is no folder of versions: name one for them with folder=, or "
            "start the engine with LLM(model, **speculation(model, folder, drafter=...))"
        )
    return DrafterFolder(started_with.resolve().parent)


def _is_warm(place: DrafterFolder, version: int) -> bool:
    """Whether the drafter was trained before."""
    first = next((row for row in place.rows() if row.get("version") == 0), {})
    return version > 0 or first.get("from") != "new"


def _make_training(
    plan: FollowPlan, where: Where, when: When, share: float, report: Callable[[str], None], deadline_s: float
) -> Training:
    if where == "process":
        plan.folder.mkdir(parents=True, exist_ok=True)
        return SideCarTraining(plan, when, report, deadline_s, plan.folder / LOG)
    if where not in ("here", "thread"):
        raise UserError(f"where='{where}' is not a place to train: use here, thread or process")
    return LocalTraining(plan, when, report, share if where == "thread" else None)
