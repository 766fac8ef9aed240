"""What a rollout compiles on a machine that has never run one, counted and timed without a GPU.

    python benchmarks/compile_time.py --geometry 7b --max-batch 128 --compile

Triton compiles a kernel anew for every type, every constant and every kind of size that it is launched with, and a
rollout waits for it. This runs the engine's passes for all batch sizes and default strategies on tensors that have no
numbers, records what they would launch on an H200, and with --compile compiles it for that device, one after the other.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from paceline.draft.eagle.drafter import EagleDrafter
from paceline.draft.eagle.model import DrafterShape, EagleModel
from paceline.draft.eagle.vocabulary import draft_vocab_size
from paceline.draft.registry import default_strategies
from paceline.kernels import device, fused, gumbel_argmax_triton, paged_attention_triton
from paceline.kernels.hopper import matmul
from paceline.model import Decoder
from paceline.rollout.filters import Filters
from paceline.rollout.pages import PagePool, default_page_size
from paceline.rollout.rows import Rows
from paceline.rollout.runner import ModelRunner
from passes import GEOMETRY, config_of

H200_SMS = 132
META = torch.device("meta")
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int32: "i32", torch.int64: "i64", torch.bool: "i1"}
OPTIONS = ("num_warps", "num_stages", "launch_pdl", "enable_fp_fusion")
WINDOW, LONGEST = 256, 4224


@dataclass(frozen=True)
class Variant:
    """A kernel as it is compiled: for each parameter its type or constant, and whether 16 divides it."""

    kernel: str
    parameters: tuple[tuple[str, Any, bool], ...]
    options: tuple[tuple[str, Any], ...]

    def compile(self, function: JITFunction) -> None:
        names = [p.name for p in function.params]
        signature = {name: kind for name, (kind, _, _) in zip(names, self.parameters, strict=True)}
        constants = {(i,): value for i, (kind, value, _) in enumerate(self.parameters) if kind == "constexpr"}
        attributes = {(i,): [["tt.divisibility", 16]] for i, (_, _, even) in enumerate(self.parameters) if even}
        source = ASTSource(function, signature, constants, attributes)
        triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(self.options))


def variant_of(function: JITFunction, args: tuple, kwargs: dict[str, Any]) -> Variant:
    given = dict(zip([p.name for p in function.params], args, strict=False)) | kwargs
    parameters = []
    for p in function.params:
        value = given.get(p.name)
        if p.is_constexpr or value is None:
            parameters.append(("constexpr", value, False))
        elif isinstance(value, Tensor):
            even = value.storage_offset() * value.element_size() % 16 == 0
            any_alignment = p.do_not_specialize or p.do_not_specialize_on_alignment
            parameters.append((f"*{NAMES[value.dtype]}", None, even and not any_alignment))
        elif isinstance(value, int):
            kind = "i32" if -(2**31) <= value < 2**31 else "i64"
            if p.do_not_specialize:
                parameters.append((kind, None, False))
            elif value == 1:
                parameters.append(("constexpr", 1, False))
            else:
                parameters.append((kind, None, value % 16 == 0))
        else:
            parameters.append(("fp32", None, False))
    name = f"{function.fn.__module__.rpartition('.')[2].removesuffix('_triton')}.{function.fn.__name__}"
    options = tuple(sorted((k, v) for k, v in kwargs.items() if k in OPTIONS))
    return Variant(name, tuple(parameters), options)


@contextlib.contextmanager
def recording() -> Iterator[dict[Variant, JITFunction]]:
    """Launches are recorded, as on an H200, and not made."""
    seen: dict[Variant, JITFunction] = {}

    def run(function: JITFunction, *args: Any, grid: Any = None, warmup: bool = False, **kwargs: Any) -> None:
        seen[variant_of(function, args, kwargs)] = function

    with contextlib.ExitStack() as stack:
        for target, name, value in (
            (JITFunction, "run", run),
            (fused, "interpreted", True),
            (matmul, "_is_tuned", lambda _: True),
            (device, "_supports_pdl", lambda _: True),
            (paged_attention_triton, "num_sms", lambda _: H200_SMS),
            (gumbel_argmax_triton, "num_sms", lambda _: H200_SMS),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        yield seen


def make_runner(geometry: str, max_batch: int) -> ModelRunner:
    config = config_of(geometry, LONGEST)
    with META:
        model = Decoder(config).to(torch.bfloat16).requires_grad_(False)
        drafted = draft_vocab_size(config.vocab_size)
        vocab = torch.arange(drafted) if drafted < config.vocab_size else None
        drafter = EagleModel(model, DrafterShape(config.intermediate_size, WINDOW), vocab)
        drafter = drafter.to(torch.bfloat16).requires_grad_(False)
    page = default_page_size(torch.device("cuda"), max_batch)
    rows = Rows(max_batch, -(-LONGEST // page), META, apart=True, num_drafters=1)
    eagle = EagleDrafter(drafter)
    eagle.bind(rows, 0, default_strategies([eagle.name]))
    return ModelRunner(model, PagePool(config, 64, page, torch.bfloat16, META), rows, None, [eagle])


def walk(runner: ModelRunner, names: list[str]) -> None:
    """All passes that graphs are captured of."""
    (eagle,) = runner.drafters
    assert isinstance(eagle, EagleDrafter)
    for batch in runner.ladder:
        runner._decode(batch, Filters.NONE, None)
        eagle.extend_cache(batch, eagle.entries(batch))
        for strategy in [s for s in default_strategies(names)[1:] if s.fits(batch)]:
            if strategy.drafter == eagle.name:
                runner._propose(batch, eagle, strategy)
            runner._verify(batch, Filters.NONE, strategy)


def measure(geometry: str, max_batch: int, compiles: bool) -> dict[str, Any]:
    with recording() as seen, torch.inference_mode():
        walk(make_runner(geometry, max_batch), ["suffix", EagleDrafter.name])
    counts = Counter(v.kernel for v in seen)
    seconds: dict[str, float] = defaultdict(float)
    if compiles:
        with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, TRITON_CACHE_DIR=folder):
            for variant, function in seen.items():
                started = time.perf_counter()
                variant.compile(function)
                seconds[variant.kernel] += time.perf_counter() - started
    for kernel, count in counts.most_common():
        print(f"{kernel:<28} {count:>3}" + (f"  {seconds[kernel]:6.2f} s" if compiles else ""), flush=True)
    total = round(sum(seconds.values()), 2) if compiles else None
    print(f"{'all':<28} {len(seen):>3}" + (f"  {total:6.2f} s" if compiles else ""))
    return {
        "geometry": geometry,
        "max_batch": max_batch,
        "triton": triton.__version__,
        "variants": len(seen),
        "by_kernel": dict(counts.most_common()),
        "seconds": total,
        "seconds_by_kernel": {k: round(v, 2) for k, v in seconds.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", choices=GEOMETRY, default="7b")
    parser.add_argument("--max-batch", type=int, default=128)
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    print(json.dumps(measure(args.geometry, args.max_batch, args.compile)))


if __name__ == "__main__":
    main()
