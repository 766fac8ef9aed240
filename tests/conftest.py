"""Models for the tests: tiny, random, in float64 where tokens must be identical, one of each family."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded at run time, in tests neither
# Beside another process of tests, one thread each: two that share two cores mostly wait for each other.
BESIDE_OTHERS = "PYTEST_XDIST_WORKER" in os.environ
torch.set_num_threads(1 if BESIDE_OTHERS else 2)
if BESIDE_OTHERS:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the commands that tests start
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as jobs in the background of a shell do; tests send it
    signal.signal(signal.SIGINT, signal.default_int_handler)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # kernels run in Triton's interpreter where there is no GPU

from paceline.model import Decoder, DecoderConfig  # noqa: E402

TINY = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}


def tiny_config(family: str = "llama", **changes: object) -> dict:
    return TINY | {"model_type": family} | changes


def tiny_model(family: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float64, **changes: object) -> Decoder:
    """A random decoder whose outputs are far from uniform, so that a wrong one shows."""
    model = Decoder(DecoderConfig.from_hf(tiny_config(family, **changes)))
    model.init_weights(seed, std=0.15)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.dim() == 1:
                param.add_(torch.empty(param.shape).normal_(0, 0.2, generator=generator))
            elif name == "head.weight":
                param.mul_(4)
    return model.to(dtype).requires_grad_(False)


@pytest.fixture(scope="session")
def embedded() -> Path:
    from paceline.model.checkpoint import EMBEDDED

    return EMBEDDED


def load_file(path: Path) -> ModuleType:
    """A script that is in no package, as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where its data classes look for their types
    spec.loader.exec_module(module)
    return module


def benchmark(name: str) -> Any:
    """A fixture: a script of benchmarks/ as a module, which other processes and other scripts can import too."""

    @pytest.fixture(scope="module", name=name)
    def module() -> Iterator[ModuleType]:
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
            yield importlib.import_module(name)

    return module


LONGEST = ("test_kills", "test_cli", "test_exactness", "test_equal", "test_resume", "test_swap", "test_toggles")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long come first: processes that share the files then end at about the same time."""
    place = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONGEST)))
