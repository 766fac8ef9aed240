"""Weights as they lie in a folder: which files there are, which tensors they hold, and whether they can be used.

What a file claims is compared with what is wanted before memory is taken for it. Weights that are packed into fewer
bits, or that are not numbers, are refused by name: a model with them would run, and be wrong.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.errors import UserError
from paceline.files.reading import check, inside, open_file, read_object, shorten

INDEX = "model.safetensors.index.json"
ONE_FILE = "model.safetensors"
FLOATS = ("F64", "F32", "F16", "BF16")
LARGEST = 65504.0
"""The largest float16. Trained weights are far below it; beyond it, or without a value, a file is damaged."""
PACKED = (
    "_scale",
    "_scale_inv",
    ".scales",
    "qweight",
    "qzeros",
    "g_idx",
    "weight_packed",
    "weight_shape",
    "weight_zero_point",
    ".absmax",
    ".quant_map",
    ".SCB",
)
"""How tensors are called that belong to weights of fewer bits."""


@dataclass(frozen=True)
class Stored:
    """A tensor in a file, of which only the description was read."""

    file: Path
    dtype: str
    """As safetensors calls it."""
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        return math.prod(self.shape)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model, in order; all of them files of its folder."""
    index = read_index(folder)
    if index is not None:
        files = [inside(folder, name) for name in sorted(set(index.values()))]
        for file in files:
            if not file.exists():
                raise UserError(f"{folder} lacks the weight file {file.name} that its index names")
        return files
    if (folder / ONE_FILE).exists():
        return [inside(folder, ONE_FILE)]
    hint = (
        "; it has .bin files, which Paceline does not read: save the model with safetensors"
        if any(folder.glob("*.bin"))
        else ""
    )
    raise UserError(f"{folder} has no weights: neither {ONE_FILE} nor {INDEX} is there{hint}")


def read_index(folder: Path) -> dict[str, str] | None:
    """Which file holds which tensor; None for a model in one file."""
    if not (folder / INDEX).exists():
        return None
    file = inside(folder, INDEX)
    known = check(dict[str, str], read_object(file).get("weight_map"), f"the weight_map of {file}")
    if not known:
        raise UserError(f"the weight_map of {file} is empty")
    for name in set(known.values()):
        inside(folder, name)
        if not name.endswith(".safetensors"):
            raise UserError(f"{file} names {shorten(repr(name))}, which is not a .safetensors file")
    return known


def inventory(folder: Path) -> dict[str, Stored]:
    """All tensors of a folder's weights, none of them loaded."""
    index = read_index(folder) or {}
    found: dict[str, Stored] = {}
    for file in weight_files(folder):
        with open_weights(file) as opened:
            for name in opened.keys():  # noqa: SIM118 (not a dict: only keys() iterates)
                if name in found:
                    raise UserError(
                        f"tensor {shorten(name)} is in {found[name].file} and again in {file}; which is it?"
                    )
                if index.get(name, file.name) != file.name:
                    raise UserError(
                        f"tensor {shorten(name)} is in {file}, but {INDEX} says that it is in {shorten(index[name])}"
                    )
                part = opened.get_slice(name)
                found[name] = Stored(file, part.get_dtype(), tuple(part.get_shape()))
    for name in index:
        if name not in found:
            raise UserError(f"{INDEX} of {folder} names the tensor {shorten(name)}, but {index[name]} does not hold it")
    return found


def check_inventory(found: Mapping[str, Stored], wanted: Mapping[str, Any], folder: Path) -> None:
    """Refuse what is packed, missing or of another shape; `wanted` has the shapes."""
    refuse_packed(found)
    missing = sorted(name for name in wanted if name not in found)
    if missing:
        some = ", ".join(missing[:3]) + (" …" if len(missing) > 3 else "")
        raise UserError(f"{folder} lacks {len(missing)} of the model's tensors: {some}")
    for name, target in wanted.items():
        stored = found[name]
        check_dtype(name, stored)
        if stored.shape != tuple(target.shape):
            raise UserError(
                f"tensor {name} in {stored.file} has shape {list(stored.shape)}, "
                f"but config.json implies {list(target.shape)}"
            )


def refuse_packed(found: Mapping[str, Stored]) -> None:
    for name, stored in found.items():
        if name.endswith(PACKED):
            raise UserError(
                f"{stored.file} holds the tensor {shorten(name)}, so the model is quantized; Paceline trains "
                "full-precision weights: dequantize it first"
            )


def check_dtype(name: str, stored: Stored) -> None:
    if stored.dtype not in FLOATS:
        raise UserError(
            f"tensor {shorten(name)} in {stored.file} is of type {shorten(str(stored.dtype))}; Paceline reads "
            f"weights in {', '.join(FLOATS)}: dequantize the model first"
        )


def check_values(name: str, value: Tensor, file: Path) -> None:
    """Refuse NaN, infinities, and what only damage makes so large. Takes 0.02 s per GB on two CPU cores."""
    if not value.numel():
        return
    low, high = (float(bound) for bound in torch.aminmax(value))
    if not (low >= -LARGEST and high <= LARGEST):  # in this form it also refuses NaN, which aminmax passes on
        worst = low if math.isnan(low) or -low > high else high
        raise UserError(
            f"tensor {shorten(name)} in {file} holds the value {worst:g}, which is no trained weight; "
            "is the file damaged?"
        )


@contextmanager
def open_weights(file: Path, device: str = "cpu") -> Iterator[Any]:
    """A safetensors file, whose description was checked by that library: sizes, offsets, and that it is not longer than
    the file."""
    os.close(open_file(file))  # it must be an ordinary file: a pipe would be waited for
    try:
        with safe_open(file, framework="pt", device=device) as opened:
            yield opened
    except SafetensorError as err:
        reason = shorten(str(err), 200)
        raise UserError(f"{file} cannot be read as safetensors ({reason}); is the download complete?") from err
    except OSError as err:
        raise UserError(f"{file} cannot be read: {shorten(str(err), 200)}") from err


def read_weights(
    found: Mapping[str, Stored], wanted: Mapping[str, Any], device: str = "cpu"
) -> Iterator[tuple[str, Tensor]]:
    """The tensors that are wanted, file by file, checked."""
    for file in sorted({stored.file for name, stored in found.items() if name in wanted}):
        with open_weights(file, device) as opened:
            for name in (name for name, stored in found.items() if stored.file == file and name in wanted):
                value = opened.get_tensor(name)
                if value.is_floating_point():
                    check_values(name, value, file)
                yield name, value
