"""A worker: the policy, an engine that writes answers, a part of the learner, and the drafter, which it trains when it
has nothing to write. One class, wherever it runs; it does what it is told and says how it goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.cluster.coordinator import Released, Report
from paceline.cluster.messages import Alive, Ready, RolloutMode, RolloutProgress, WorkerSpec
from paceline.cluster.peers import Peers, Rendezvous
from paceline.config import Config
from paceline.core import Completion, Request, Trajectory
from paceline.draft.eagle.model import save_drafter
from paceline.errors import UserError
from paceline.learn.learner import Learner, Score, Sums, UpdateBatch
from paceline.learn.shards import Holders, make_slots, place
from paceline.learn.state import load_learner, save_learner
from paceline.model import load_model, save_model
from paceline.model.tokenizer import load_tokenizer
from paceline.observe.rounds import RoundLog
from paceline.observe.timeline import IDLE, TRAIN, Span
from paceline.rollout import RolloutEngine
from paceline.rollout.differences import Difference, explain
from paceline.rollout.stats import EngineStats, RoundRecord
from paceline.setup.build import DRAFTER, make_drafter, make_engine
from paceline.spot.evaluation import Evaluation
from paceline.spot.learning import DrafterLearning, when_to_train
from paceline.spot.merge import contribution, merged
from paceline.spot.overlap import OverlappedTraining
from paceline.spot.state import load_training, save_training
from paceline.spot.trainer import TrainingStats
from paceline.spot.writer import DrafterWriter

SILENCE = 0.1  # seconds after which a worker that is at work says so
SHORT = 1e-3  # seconds: what took less is not worth a span

Shares = dict[int, list[int]]


@dataclass(frozen=True)
class RolloutOutcome:
    """What a rollout came to on one worker."""

    spans: list[Span]
    stats: EngineStats
    rounds: list[RoundRecord]
    spell: TrainingStats
    explored_s: float
    """Seconds that went to strategies that are not the best known, of"""
    tuned_s: float


class Worker:
    def __init__(self, config: Config, post: WorkerSpec, tell: Callable[[Report], None]):
        self.config, self.post, self.tell = config, post, tell
        if post.threads:
            torch.set_num_threads(post.threads)
        device = torch.device(post.device)
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)
        self.model = load_model(post.source, config.model.dtype, device)
        sizes = {name: p.numel() for name, p in self.model.named_parameters()}
        self.slots = make_slots(sizes, post.workers)
        self.peers = Peers(Rendezvous("", 0, 0, (post.number,), "", 0.0), post.number)
        self.holders = place(post.workers, range(post.workers))
        self.learner = Learner(self.model, config, self._held())
        self.learner.on_batch = self._still_there
        if post.state is not None:
            load_learner(self.learner, post.state)
        drafter = post.state / DRAFTER if post.state and (post.state / DRAFTER).is_dir() else None
        # Only stop texts need a tokenizer here, and it takes seconds to load.
        self._decode = load_tokenizer(post.source).decode if config.rollout.stop else None
        self.neural = make_drafter(self.model, config, drafter)
        self._engines: dict[str, RolloutEngine] = {}
        self.adaptive = self.engine = self._engine("adaptive")
        self._beside: OverlappedTraining | None = None
        self.spot = self._make_spot()
        self.training = False
        self._failed = False
        self._lesson: UpdateBatch | None = None
        self._sums = Sums()
        self._learned: dict[str, float] = {}
        self._candidate: list[Tensor] | None = None
        self._keeper = DrafterWriter(post.run / DRAFTER) if post.run and self.spot else None
        self._spans: list[Span] = []
        self._rounds: list[RoundRecord] = []
        self._logs: dict[str, RoundLog] = {}
        self._way = "adaptive"
        self._step, self._doing = 0, (IDLE, time.time())
        self._before = self.engine.stats.snapshot()
        self._tuner_before = (0.0, 0.0)
        self._word = 0.0

    def ready(self) -> Ready:
        return Ready(*self._me, max_length=self.engine.max_length, has_drafter=self.neural is not None)

    @property
    def _me(self) -> tuple[int, int]:
        return self.post.number, self.post.life

    def _make_spot(self) -> DrafterLearning | None:
        neural = self.neural
        when = when_to_train(self.config, neural is not None)
        if when == "off":
            return None
        if when == "tail" and self.post.workers == 1 and self.model.device.type != "cuda":
            raise UserError(
                "spot.when=tail trains the drafter on workers that have run dry, but there is only one, and no GPU on "
                "which it could train beside decoding: set cluster.workers=2 or more, or spot.when=update"
            )
        if neural is None:
            raise UserError(
                f"spot.when={when} trains a neural drafter, but there is none: set speculation.drafter=new to "
                "begin with an untrained one, and leave speculation.mode at adaptive"
            )
        config = self.config.spot.model_copy(update={"when": when})
        warm = self.config.speculation.drafter != "new"
        seed = self.config.seed + self.post.number
        spot = DrafterLearning(neural, config, seed, self.post.workers, warm)
        if spot.in_tail and self.post.workers == 1 and self.model.device.type == "cuda":
            self._beside = OverlappedTraining(spot.trainer)
        self.learner.watch = spot.watch
        self.learner.wants = spot.wants
        if self.post.state is not None:
            load_training(spot.trainer, self.post.state / DRAFTER)
        return spot

    # Rollout

    def _engine(self, name: str) -> RolloutEngine:
        if name not in self._engines:
            config = self.config
            if name == "plain":
                plain = config.speculation.model_copy(update={"mode": "plain"})
                config = config.model_copy(update={"speculation": plain})
            self._engines[name] = make_engine(self.model, config, self._decode, self.neural, self.post.sharing)
        return self._engines[name]

    def begin(self, step: int, way: RolloutMode, train: bool = False) -> None:
        """A rollout begins. With `train`, a worker alone on its GPU trains the drafter beside the last answers."""
        self.engine = self._engine(way.engine)
        self.engine.clear()
        self.training = False
        new, self._step = step != self._step, step
        self._spans, self._rounds = [], []
        log = self._logs.setdefault(way.engine, RoundLog(self._add_span, self.post.number))
        log.step, self._way = step, way.engine
        self.engine.record = self._recorder(log) if way.keep_rounds else log
        self._before = self.engine.stats.snapshot()
        self._tuner_before = (self.engine.tuner.explored_s, self.engine.tuner.total_s)
        self._doing = (IDLE, time.time())
        if self.spot and self.engine is self.adaptive:
            self.spot.begin_rollout(new)
        if self._beside:
            self._beside.start(train and self.engine is self.adaptive)

    def _add_span(self, span: Span) -> None:
        self._spans.append(span)

    def _recorder(self, log: RoundLog) -> Callable[[RoundRecord], None]:
        def record(round: RoundRecord) -> None:
            log(round)
            self._rounds.append(round)

        return record

    def assign(self, requests: Sequence[Request]) -> None:
        if not self.engine.unfinished:
            self._now_doing(None)
        self.training = False
        self.engine.submit(requests)

    def release(self, count: int) -> None:
        self.tell(Released(*self._me, tuple(self.engine.release(count))))
        if not self.engine.unfinished:
            self._now_doing(IDLE)

    def train(self) -> None:
        self.training = self.spot is not None
        self._now_doing(TRAIN if self.training else IDLE)

    def stop(self) -> None:
        self.training = False
        self._now_doing(IDLE)

    @property
    def busy(self) -> bool:
        """Whether there is something to do without being told."""
        return not self._failed and (bool(self.engine.unfinished) or self.training)

    @property
    def doing(self) -> str:
        """What `turn` does next, in words."""
        return "decoding" if self.engine.unfinished else "training the drafter"

    def abandon(self) -> None:
        """Something raised: do nothing any more without being told, and leave the process group, so that those who wait
        for this worker hear of it at once."""
        self._failed = True
        self.training = False
        self.peers.close()

    def turn(self) -> None:
        """Do a little of what there is to do: a round of decoding, or a step of training."""
        if self.engine.unfinished:
            self._decode_round()
        elif self.training and self.spot:
            if not self.spot.step():  # nothing to learn from
                self.stop()
            self._still_there()

    def _decode_round(self) -> None:
        done = self.engine.step()
        if self.spot and self.engine is self.adaptive and not self._beside:
            for completion in done:
                self.spot.finished(completion.request.prompt, completion.tokens)
        if self._beside:
            self._beside.after_round(self.engine.unfinished, self.engine.waiting)
        now = time.monotonic()
        if done or now > self._word:
            self._word = now + SILENCE
            written = self.engine.stats.decoded_tokens - self._before.decoded_tokens
            self.tell(RolloutProgress(*self._me, tuple(done), self.engine.waiting, written))
        if not self.engine.unfinished:
            self._now_doing(IDLE)

    def _still_there(self) -> None:
        now = time.monotonic()
        if now > self._word:
            self._word = now + SILENCE
            self.tell(Alive(*self._me))

    def _now_doing(self, what: str | None) -> None:
        """Idle or training; None while it decodes, which the engine's rounds tell. A worker that is alone waits for
        nobody: when it has nothing left to write, answers are being judged."""
        name, since = self._doing
        now = time.time()
        if name and now - since > SHORT and not (name == IDLE and self.post.workers == 1):
            self._add_span(Span(self.post.number, name, since, now - since, self._step, {}))
        self._doing = (what or "", now)

    def end(self) -> RolloutOutcome:
        """The rollout is over."""
        self._now_doing(None)
        self._logs[self._way].end()
        stats = self.engine.stats.since(self._before)
        if self.spot and self._beside:
            self.spot.spell += self._beside.stop()
        spell = self.spot.spell if self.spot else TrainingStats()
        tuner = self.engine.tuner
        tuned = (tuner.explored_s - self._tuner_before[0], tuner.total_s - self._tuner_before[1])
        self.engine = self.adaptive
        return RolloutOutcome(self._spans, stats, self._rounds, spell, *tuned)

    def clear(self) -> None:
        """Drop every request: the rollout will not be finished."""
        self.training = False
        if self._beside:
            self._beside.stop()
        self.engine.clear()

    def explain(self, pairs: list[tuple[Completion, Completion]]) -> list[Difference]:
        return explain(self.model, pairs)

    # Learning

    def score(self, answers: list[Trajectory], shares: Shares) -> list[Score]:
        scores = self.learner.score(answers, shares[self.post.number])
        return [Score(*(t if t is None else t.cpu() for t in score)) for score in scores]

    def teach(
        self, answers: list[Trajectory], step: int, scores: list[Score]
    ) -> tuple[int, list[list[int]], list[int]]:
        """Here is what was learned from -> updates made so far, which answers each of the coming ones takes, and what
        each answer costs."""
        self._lesson = self.learner.lesson(answers, step, scores)
        return self.learner.updates, self._lesson.updates, self._lesson.work(self.learner.watch is not None)

    def gradients(self, update: int, shares: Shares) -> None:
        """Leave the gradients of a whole update in the parameters. Can be repeated."""
        lesson = self._lesson
        assert lesson is not None, "teach comes first"
        if self.spot and update < lesson.fresh:
            shown = {i: lesson.answers[i] for i in shares[self.post.number]}
            texts = {i: ([*a.prompt, *a.tokens], len(a.prompt)) for i, a in shown.items()}
            self.spot.begin_update([len(a.tokens) for a in lesson.answers], texts, first=update == 0)
        sums = self.learner.gradients(lesson, update, shares[self.post.number])
        if self.peers.alone:
            self._sums = sums
            return
        both = sums.tensor(self.model.device)
        self.peers.sum([both, *(p.grad for p in self.model.parameters() if p.grad is not None)])
        self._sums = Sums.of(both)

    def apply(self, update: int, number: int) -> dict[str, float]:
        """Make update `number` of the run, and have the same weights everywhere. Can be repeated."""
        assert self._lesson is not None
        if self.learner.updates == number:
            self._learned = self.learner.apply(self._lesson, update, self._sums)
        params = dict(self.model.named_parameters())
        for slot, holders in zip(self.slots, self.holders, strict=True):
            self.peers.share([params[name].data for name in slot], holders[0])
        self.adaptive.refresh()
        return self._learned

    # The drafter

    def spend(self, seconds: float) -> TrainingStats:
        """Train the drafter for so long."""
        assert self.spot is not None
        self.spot.spend(seconds)
        return self.spot.spell

    def merge(self) -> Evaluation | None:
        """Make the next drafter from those of all that trained, and judge it -> None if nobody did. Can be repeated."""
        assert self.spot is not None
        parts = contribution(self.spot.trainer)
        if not self.peers.alone:
            parts = [part.float() for part in parts]  # half the way for what is rounded to that in the end
        self.peers.sum(parts)
        self._candidate = merged(parts)
        if self._candidate is None:
            self.spot.trainer.adopt(None)  # what is not finite is thrown away
            return None
        before, after, tokens = self.spot.trainer.judge_candidate(self._candidate)
        seen = torch.tensor([before * tokens, after * tokens, tokens], dtype=torch.float64)
        self.peers.sum([seen])
        before, after, tokens = seen.tolist()
        return Evaluation(before / max(tokens, 1), after / max(tokens, 1), int(tokens))

    def settle(self, verdict: Evaluation) -> None:
        """Take the drafter that was made, or not. Can be repeated."""
        assert self.spot is not None
        if self._candidate is not None:
            self.spot.trainer.settle(self._candidate, verdict)
            self.adaptive.tuner.renew()
            if verdict.better and self._keeper and self.neural and self.peers.members[0] == self.post.number:
                self._keeper.keep(self.neural)
        self._candidate = None

    # Coming, going, keeping

    def join(self, meeting: Rendezvous, newcomers: tuple[int, ...], before: list[Holders]) -> None:
        """Form a circle with others. Newcomers get all that the others have; each slot of the optimizer's state gets
        to whoever is to hold it from one that does, as `before` says. Can be repeated."""
        self.peers.close()
        self.peers = Peers(meeting, self.post.number, self._waits)
        holders = place(len(self.slots), meeting.members)
        if newcomers:
            veteran = next(w for w in meeting.members if w not in newcomers)
            self.peers.share(self._everything(), veteran)
            self._take_counts(veteran)
        for slot, old, new in zip(self.slots, before, holders, strict=True):
            if not set(new) <= set(old):
                missing = [name for name in slot if name not in self.learner.optimizer.mean]
                for name in missing:
                    self.learner.optimizer.hold(name)
                self.peers.share([t for name in slot for t in self.learner.optimizer.tensors(name)], old[0])
        self.holders = holders

    def joined(self) -> None:
        """All others have formed the circle too: let go of what is held by others now."""
        kept = set(self._held())
        for name in [name for name in self.learner.optimizer.mean if name not in kept]:
            self.learner.optimizer.drop(name)

    def _held(self) -> list[str]:
        pairs = zip(self.slots, self.holders, strict=True)
        return [name for slot, holders in pairs if self.post.number in holders for name in slot]

    def _everything(self) -> list[Tensor]:
        models: list[torch.nn.Module | None] = [self.model, self.learner.reference, self.neural]
        return [p.data for model in models if model is not None for p in model.parameters()]

    def _take_counts(self, veteran: int) -> None:
        trainer = self.spot.trainer if self.spot else None
        counts = [self.learner.updates, self.learner.optimizer.steps, trainer.version if trainer else 0]
        tensor = torch.tensor(counts)
        self.peers.share([tensor], veteran)
        self.learner.updates, self.learner.optimizer.steps, version = tensor.tolist()
        self.adaptive.refresh()
        if trainer:
            trainer.restart(version)

    def _waits(self) -> None:
        self.tell(Alive(*self._me, waits=True))

    def save(self, folder: Path, first: int) -> dict[str, Any]:
        """Write this worker's part of a checkpoint, the policy too if it is the first -> what its tuner knows. Can be
        repeated."""
        policy = first == self.post.number
        if self._keeper:
            self._keeper.wait()
        if policy:
            save_model(self.model, folder)
            if self.spot and self.neural:
                save_drafter(self.neural, folder / DRAFTER)
                save_training(self.spot.trainer, folder / DRAFTER)
        pairs = zip(self.slots, self.holders, strict=True)
        mine = [name for slot, holders in pairs if self.post.number == holders[0] for name in slot]
        save_learner(self.learner, folder, self.post.number, mine, reference=policy)
        return self.adaptive.tuner.state()

    def restore_tuner(self, state: dict[str, Any]) -> None:
        self.adaptive.tuner.restore(state)
