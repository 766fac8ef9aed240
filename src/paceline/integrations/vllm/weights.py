"""The policy's weights on their way from the learner's process to vLLM's workers: by CUDA IPC where they lie on a GPU,
which copies nothing on the way, and by a file in shared memory otherwise."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from paceline.errors import UserError
from paceline.integrations.vllm.rollout_messages import PolicyWeights

SHARED = Path("/dev/shm")
SPARE = 1.05  # of the weights' size that must be free in shared memory
DEVICE = 6  # where `rebuild_cuda_tensor` takes the index of the device


@contextlib.contextmanager
def shared_weights(tensors: Mapping[str, Tensor], scratch: Path | None) -> Iterator[PolicyWeights]:
    """Weights as they are now, to be read by another process until the end of the context. `scratch` is a folder on
    disk, for what shared memory has no room for."""
    if any(tensor.is_cuda for tensor in tensors.values()):
        kept = dict(tensors)  # what was made for this purpose must live until it is read
        torch.cuda.synchronize()
        yield PolicyWeights(handles=pickle.dumps(_handles(kept)))
        torch.cuda.ipc_collect()
        return
    folder = _folder(sum(t.numel() * t.element_size() for t in tensors.values()), scratch)
    try:
        file = folder / "policy.safetensors"
        try:
            save_file({name: t.detach().contiguous() for name, t in _without_sharing(tensors)}, file)
        except (OSError, SafetensorError) as err:
            raise UserError(f"the policy's weights could not be written to {file} for vLLM: {err}") from err
        yield PolicyWeights(file=str(file))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _folder(size: int, scratch: Path | None) -> Path:
    places = [SHARED] if SHARED.is_dir() and os.access(SHARED, os.W_OK) else []
    places = [place for place in places if shutil.disk_usage(place).free > SPARE * size]
    place = places[0] if places else scratch
    try:
        return Path(tempfile.mkdtemp(prefix="paceline-policy-", dir=place))
    except OSError as err:
        raise UserError(f"no folder for the policy's weights could be made in {place}: {err}") from err


def _without_sharing(tensors: Mapping[str, Tensor]) -> Iterable[tuple[str, Tensor]]:
    """Parts of a fused tensor share its memory, which safetensors refuses."""
    seen: set[int] = set()
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        yield name, tensor.clone() if storage in seen else tensor
        seen.add(storage)


def _handles(tensors: Mapping[str, Tensor]) -> list[tuple[str, Any]]:
    from torch.multiprocessing.reductions import reduce_tensor

    return [(name, reduce_tensor(tensor.detach())) for name, tensor in tensors.items()]


def read_shared(weights: PolicyWeights, device: int | None) -> Iterator[tuple[str, Tensor]]:
    """In another process; `device` is the index that the learner's GPU has there."""
    if weights.handles is not None:
        for name, (rebuild, arguments) in pickle.loads(weights.handles):
            if device is not None:
                arguments = (*arguments[:DEVICE], device, *arguments[DEVICE + 1 :])
            yield name, rebuild(*arguments)
        return
    assert weights.file is not None
    with safe_open(weights.file, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118 (not a dict: only keys() iterates)
            yield name, opened.get_tensor(name)
