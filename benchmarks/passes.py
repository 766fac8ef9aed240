"""The engine's own passes, to be measured: on random weights of a known geometry, with rows in mid-answer.

What roofline.py, tune_steps.py and compile_time.py have in common.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.core import Request, SamplingParams
from paceline.draft.base import BaseDrafter, Draft
from paceline.draft.strategy import PLAIN, Strategy
from paceline.draft.suffix.drafter import SuffixDrafter
from paceline.kernels.hopper import matmul
from paceline.model import Decoder, DecoderConfig
from paceline.model.decoder import as_dtype
from paceline.rollout import EngineSettings, RolloutEngine
from paceline.rollout.graphs import GraphPool
from paceline.rollout.runner import PassRows
from paceline.rollout.sequence import Sequence

#            layers hidden heads kv   ff   vocab   tied
GEOMETRY = {
    "7b":   (28, 3584, 28, 4, 18944, 152064, False),  # Qwen2.5-7B
    "1.5b": (28, 1536, 12, 2, 8960, 151936, True),  # Qwen2.5-1.5B
    "0.5b": (24, 896, 14, 2, 4864, 151936, True),  # Qwen2.5-0.5B
    "100m": (12, 768, 12, 4, 3072, 512, False),
    "tiny": (7, 64, 4, 2, 128, 512, False),
}  # fmt: skip
LOOKAHEAD_SLOTS = 64  # slots after the context that a round may write to


def config_of(name: str, longest: int) -> DecoderConfig:
    layers, hidden, heads, kv_heads, ff, vocab, tied = GEOMETRY[name]
    hf = {
        "model_type": "qwen2", "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "intermediate_size": ff, "vocab_size": vocab, "tie_word_embeddings": tied,
        "max_position_embeddings": longest, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    }  # fmt: skip
    return DecoderConfig.from_hf(hf)


@torch.no_grad()
def make_model(config: DecoderConfig, device: torch.device) -> Decoder:
    """Random weights, made where they will be used: a 7B would take minutes on the host."""
    with torch.device("meta"):
        model = Decoder(config)
    model = model.to(as_dtype("auto", device)).to_empty(device=device).requires_grad_(False)
    if config.tied:
        model.head.weight = model.embed.weight
    return randomize(model)


@torch.no_grad()
def randomize(module: nn.Module) -> Any:
    for name, param in module.named_parameters():
        if param.dim() > 1:
            param.normal_(0, param.shape[1] ** -0.5)
        else:
            param.fill_(0.0 if name.endswith("bias") else 1.0)
    return module


class Clock:
    """Device and host seconds of calls. On a CPU, where there are no graphs, both are the host's."""

    def __init__(self, device: torch.device, repeat: int):
        self.device, self.repeat = device, repeat
        self.events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def around(self, work: Callable[[], Any]) -> Any:
        """Run `work` between two events."""
        pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        pair[0].record()
        out = work()
        pair[1].record()
        self.events.append(pair)
        return out

    def measure(self, *works: Callable[[], Any]) -> list[tuple[float, float]]:
        """Median milliseconds of the device and of the host, of each; they take turns, because a card that has become
        warm is slower."""
        for work in works:
            for _ in range(3 if self.device.type == "cuda" else 1):
                work()
        device: list[list[float]] = [[] for _ in works]
        host: list[list[float]] = [[] for _ in works]
        for _ in range(self.repeat):
            for i, work in enumerate(works):
                self.wait()
                self.events.clear()
                started = time.perf_counter()
                work()
                self.wait()
                host[i].append(1e3 * (time.perf_counter() - started))
                device[i].append(sum(a.elapsed_time(b) for a, b in self.events) if self.events else host[i][-1])
        return [(statistics.median(d), statistics.median(h)) for d, h in zip(device, host, strict=True)]


class TimedGraphs(GraphPool):
    """The engine's graphs, with events around each replay."""

    def __init__(self, clock: Clock):
        super().__init__()
        self.clock = clock

    def run(self, key: object, work: Any, changed: torch.Tensor | None = None) -> Any:
        return self.clock.around(lambda: super(TimedGraphs, self).run(key, work, changed))


class Bench:
    """An engine whose rows are requests in mid-answer, as many as are asked for."""

    def __init__(
        self,
        model: Decoder,
        clock: Clock,
        batch: int,
        longest: int,
        pages: int,
        drafters: Any = (),
        strategies: Any = (PLAIN,),
    ):
        self.model, self.clock = model, clock
        settings = EngineSettings(max_batch=batch, max_length=longest, pages=pages)
        # An engine refuses strategies whose drafter it has not.
        self.engine = RolloutEngine(model, settings, None, [*drafters, SuffixDrafter(1, 64)], strategies)
        if self.engine.runner.graphs is not None:
            self.engine.runner.graphs = TimedGraphs(clock)
        for part in (self.engine.pool.k, self.engine.pool.v):
            part.normal_()
        self.sequences: list[Sequence] = []

    def seat(self, batch: int, context: int) -> None:
        """Rows of `batch` requests, each with `context` tokens in the cache and one more that is not."""
        engine, vocab = self.engine, self.model.config.vocab_size
        for seq in self.sequences:
            engine.pool.release(seq.pages)
        dice = np.random.default_rng(batch)
        self.sequences.clear()
        for row in range(batch):
            tokens = dice.integers(vocab, size=context + 1).tolist()
            seq = Sequence.of(Request(row, tuple(tokens), SamplingParams(max_tokens=LOOKAHEAD_SLOTS)))
            seq.pages = engine.pool.take(engine.pool.needed(context + LOOKAHEAD_SLOTS))
            seq.slot = row + 1
            engine.rows.put(row, seq)
            engine.rows.context[row] = context
            self.sequences.append(seq)

    def decode(self, batch: int) -> Callable[[], Any]:
        return lambda: self.engine.runner.decode(PassRows(batch)).read()

    def verify(self, batch: int, strategy: Strategy) -> Callable[[], Any]:
        """Draft tokens that are not accepted: what a pass costs does not depend on that."""
        drafter = FixedDrafter(batch, strategy)

        def work() -> None:
            self.engine.runner.propose(PassRows(batch), drafter, strategy)
            self.engine.runner.verify(PassRows(batch), strategy).read()

        return work

    def draft(self, batch: int, strategy: Strategy) -> Callable[[], Any]:
        rows, drafter = self.engine.rows, self.engine.drafters[strategy.drafter]
        cached, _ = rows.drafter_columns(0)

        def work() -> None:
            cached[:batch] = rows.context[:batch] - 2  # two draft tokens were accepted, and there was a bonus token
            self.engine.runner.propose(PassRows(batch), drafter, strategy)

        return work

    def end_draft(self, batch: int, strategy: Strategy) -> None:
        """A round ends with a pass that verifies, which takes along the noise of the draft."""
        self.engine.runner.verify(PassRows(batch), strategy).read()

    def time(self, *works: Callable[[], Any]) -> list[tuple[float, float]]:
        return self.clock.measure(*works)


class FixedDrafter(BaseDrafter):
    """The same draft each time."""

    name = "fixed"

    def __init__(self, batch: int, strategy: Strategy):
        self.draft = Draft.empty(batch, strategy.nodes)
        self.draft.tokens[:] = 1
        if not strategy.chain:
            self.draft.parents[:] = np.maximum(np.arange(strategy.nodes) - strategy.width + 1, 0)

    def propose(self, sequences: Any, strategy: Strategy) -> Draft:
        return self.draft


def chain(tokens: int) -> Strategy:
    return Strategy("suffix", tokens - 1, 1, tokens - 1)


def use_table(file: str) -> None:
    """Instead of the shipped one, or none: then cuBLAS makes all matmuls. Attention keeps the shipped tiles that the
    file does not name."""
    if file == "none":
        matmul.MATMUL_TILES = {}
        return
    from paceline.kernels import paged_attention_triton as attention

    matmul.MATMUL_TILES = matmul.read_matmul_tiles(Path(file))
    attention.ATTENTION_TILES = attention.ATTENTION_TILES | attention.read_attention_tiles(Path(file))


def pages_for(batch: int, context: int) -> int:
    """More than a page for each place at the size of a GPU's pages; a CPU's are larger, and so needs fewer."""
    return batch * ((context + LOOKAHEAD_SLOTS) // 64 + 2) + 2
