"""The weight files of a model folder: which there are, which tensors they hold, and whether they can be used.

The headers of files are compared with the shapes that config.json implies before memory is allocated. Weights that are
quantized, or NaN or infinite, are refused by name: a model with them would run, and be wrong.
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
WEIGHTS_FILE = "model.safetensors"
WEIGHT_DTYPES = ("F64", "F32", "F16", "BF16")
MAX_WEIGHT = 65504.0
"""The largest float16. Trained weights are far below it; beyond it, or NaN, a file is damaged."""
QUANTIZED_SUFFIXES = (
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
"""Endings of the names of tensors that belong to quantized weights."""


@dataclass(frozen=True)
class Stored:
    """A tensor in a file, of which only the header was read."""

    file: Path
    dtype: str
    """In safetensors' spelling, such as BF16."""
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
    if (folder / WEIGHTS_FILE).exists():
        return [inside(folder, WEIGHTS_FILE)]
    hint = (
        "; it has .bin files, which Paceline does not read: save the model with safetensors"
        if any(folder.glob("*.bin"))
        else ""
    )
    raise UserError(f"{folder} has no weights: neither {WEIGHTS_FILE} nor {INDEX} is there{hint}")


def read_index(folder: Path) -> dict[str, str] | None:
    """The file of each tensor, by name; None for a model in one file."""
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
    """All tensors in a folder's weight files by name, none of them loaded."""
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
    """Refuse weights that are quantized, missing or of another shape than those in `wanted`."""
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
    """Refuse quantized weights, by the names of the tensors that come with them."""
    for name, stored in found.items():
        if name.endswith(QUANTIZED_SUFFIXES):
            raise UserError(
                f"{stored.file} holds the tensor {shorten(name)}, so the model is quantized; Paceline trains "
                "full-precision weights: dequantize it first"
            )


def check_dtype(name: str, stored: Stored) -> None:
    if stored.dtype not in WEIGHT_DTYPES:
        raise UserError(
            f"tensor {shorten(name)} in {stored.file} is of type {shorten(str(stored.dtype))}; Paceline reads "
            f"weights in {', '.join(WEIGHT_DTYPES)}: dequantize the model first"
        )


def check_values(name: str, value: Tensor, file: Path) -> None:
    """Refuse NaN, infinities, and values above MAX_WEIGHT. Takes 0.02 s per GB on two CPU cores."""
    if not value.numel():
        return
    low, high = (float(bound) for bound in torch.aminmax(value))
    if not (low >= -MAX_WEIGHT and high <= MAX_WEIGHT):  # in this form it also refuses NaN, which aminmax passes on
        worst = low if math.isnan(low) or -low > high else high
        raise UserError(
            f"tensor {shorten(name)} in {file} holds the value {worst:g}, which is no trained weight; "
            "is the file damaged?"
        )


@contextmanager
def open_weights(file: Path, device: str = "cpu") -> Iterator[Any]:
    """An open safetensors file, whose header the library has checked: sizes, and offsets within the file."""
    os.close(open_file(file))  # it must be a regular file: reading a pipe would block
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
    """(name, tensor) of all in `wanted`, file by file, with their values checked."""
    for file in sorted({stored.file for name, stored in found.items() if name in wanted}):
        with open_weights(file, device) as opened:
            for name in (name for name, stored in found.items() if stored.file == file and name in wanted):
                value = opened.get_tensor(name)
                if value.is_floating_point():
                    check_values(name, value, file)
                yield name, value
