"""One reader for everything that comes from outside: recipes, rows, configs, indexes, saved state, logs.

Whatever is wrong with a file, the reader refuses it with a `UserError`: one sentence that names the file, the line or
key, and what to do. It never waits (a pipe or a device is not a file), never reads more than it was told to, never
follows a name or a link out of the folder it was given, and never lets a parser's own exceptions through.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from paceline.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

MAX_BYTES = 64 * 2**20
"""Of a file that is read whole. The largest that people have are tokenizers, of some tens of megabytes."""
MAX_DEPTH = 100
"""Of nesting, in JSON and YAML. Nothing that we read needs ten."""
MAX_YAML_NODES = 200_000
"""Of a YAML document with its aliases written out: a few lines of aliases can stand for billions of values."""
MAX_BITS = 1023
"""Of a whole number: such a one is finite as a floating-point number too, and can be written into a sentence."""

MAX_NAME = 255
"""Bytes of a file's name; file systems know no longer ones."""

T = TypeVar("T")


def open_file(file: Path) -> int:
    """A file descriptor of an ordinary file. Opening a pipe would wait for its writer, and a device may never end."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as err:
        raise UserError(f"no file at {file}") from err
    except (OSError, ValueError) as err:  # ValueError: a name with a zero byte in it
        raise UserError(f"{_shown(file)} cannot be opened: {_reason(err)}") from err
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UserError(f"{file} is not an ordinary file")
    return descriptor


def read_bytes(file: Path, limit: int = MAX_BYTES) -> bytes:
    with os.fdopen(open_file(file), "rb") as opened:
        try:
            data = opened.read(limit + 1)
        except OSError as err:
            raise UserError(f"{file} cannot be read: {_reason(err)}") from err
    if len(data) > limit:
        raise UserError(f"{file} is larger than {limit:,} bytes, which is more than Paceline reads of such a file")
    return data


def read_text(file: Path, limit: int = MAX_BYTES) -> str:
    """The text of a UTF-8 file."""
    return decode(read_bytes(file, limit), str(file))


def decode(data: bytes, where: str) -> str:
    """UTF-8 without lone surrogates; a mark at the beginning is dropped."""
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as err:
        line = data.count(b"\n", 0, err.start) + 1
        raise UserError(f"line {line} of {where} is not UTF-8 text; save it as UTF-8") from err


def read_lines(file: Path, limit: int = MAX_BYTES) -> Iterator[tuple[int, bytes]]:
    """The lines of a file of any size, each with its number and its line end, if it has one; the file is read as they
    are asked for."""
    with os.fdopen(open_file(file), "rb") as opened:
        number = 0
        while True:
            try:
                line = opened.readline(limit + 1)
            except OSError as err:
                raise UserError(f"{file} cannot be read: {_reason(err)}") from err
            if not line:
                return
            number += 1
            if len(line) > limit:
                raise UserError(f"line {number} of {file} is longer than {limit:,} bytes")
            yield number, line


def parse_json(text: str, where: str, constants: bool = False) -> Any:
    """A JSON value without NaN or Infinity, which JSON does not have (unless `constants` lets them pass), not nested
    too deep, every string of it such that it can be written as UTF-8."""
    try:
        value = json.loads(text, parse_constant=None if constants else _refuse_constant)
    except json.JSONDecodeError as err:
        line = f" (line {err.lineno})" if "\n" in text.strip() else ""
        raise UserError(f"{where} is not valid JSON{line}: {err.msg}") from err
    except RecursionError as err:
        raise UserError(f"{where} is nested more than {MAX_DEPTH} levels deep") from err
    except ValueError as err:  # a constant that is refused, or a number with thousands of digits
        raise UserError(f"{where} is not valid JSON: {_reason(err)}") from err
    _check_values(value, where)
    return value


def read_json(file: Path, limit: int = MAX_BYTES) -> Any:
    return parse_json(read_text(file, limit), str(file))


def read_object(file: Path, limit: int = MAX_BYTES) -> dict[str, Any]:
    """A JSON file that holds an object."""
    value = read_json(file, limit)
    if not isinstance(value, dict):
        raise UserError(f"{file} holds a {_kind(value)}, not an object with keys and values")
    return value


def parse_yaml(text: str, where: str) -> Any:
    """A YAML value of plain data. Besides its own errors the parser raises whatever Python's constructors do, for
    dates that do not exist, for example."""
    try:
        loader = yaml.SafeLoader(text)
        document = loader.get_single_node()
        _count_nodes(document, where)
        value = loader.construct_document(document) if document is not None else None
    except yaml.YAMLError as err:
        raise UserError(f"{where} is not valid YAML: {shorten(str(err), 300)}") from err
    except RecursionError as err:
        raise UserError(f"{where} is nested more than {MAX_DEPTH} levels deep") from err
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, IndexError) as err:
        raise UserError(f"{where} holds a value that cannot be read: {_reason(err)}") from err
    _check_values(value, where)
    return value


def read_yaml(file: Path, limit: int = MAX_BYTES) -> Any:
    return parse_yaml(read_text(file, limit), str(file))


def check(kind: type[T], value: Any, where: str) -> T:
    """`value` as a `kind` (anything that pydantic understands); the sentence names the first key that is wrong."""
    return checker(kind)(value, where)


def checker(kind: type[T]) -> Callable[[Any, str], T]:
    """`check` for many values of a kind, prepared once."""
    adapter = TypeAdapter(kind)

    def check_one(value: Any, where: str) -> T:
        try:
            return adapter.validate_python(value)
        except ValidationError as err:
            raise UserError(_explain(err, where)) from err

    return check_one


def _explain(err: ValidationError, where: str) -> str:
    first = err.errors(include_url=False, include_context=False)[0]
    key = shorten(".".join(str(part) for part in first["loc"]))
    problem = first["msg"].removeprefix("Value error, ").replace("Input should be", "it should be")
    if first["type"] == "missing":
        return f"{where} has no '{key}'"
    given = "" if first["type"] == "value_error" else f" = {shorten(repr(first['input']))}"
    return f"'{key or 'the value'}'{given} in {where} does not work: {problem}"


def read_tensors(file: Path, device: str = "cpu") -> dict[str, Tensor]:
    """The tensors of a safetensors file; numbers that are not finite are refused."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    os.close(open_file(file))  # the library would wait for the writer of a pipe
    try:
        tensors = load_file(file, device=device)
    except (SafetensorError, OSError, ValueError, TypeError, KeyError, RuntimeError, OverflowError) as err:
        raise UserError(f"{file} is not a whole safetensors file: {_reason(err)}") from err
    for name, tensor in tensors.items():
        numbers = tensor.float() if tensor.itemsize == 1 else tensor  # 8-bit floats know no isfinite
        if tensor.is_floating_point() and not bool(torch.isfinite(numbers).all()):
            raise UserError(f"tensor {shorten(name)} of {file} holds NaN or infinite numbers")
    return tensors


def named_path(text: str) -> Path:
    """A path as a user wrote it, whether there is anything or not; refused if the system cannot even look it up."""
    path = Path(text)
    try:
        path = path.expanduser()
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return path
    except (OSError, ValueError, RuntimeError) as err:  # RuntimeError: the home of a user that does not exist
        raise UserError(f"{_shown(path)} cannot be looked up: {_reason(err)}") from err
    return path


def inside(folder: Path, name: str) -> Path:
    """The file `name` of a folder, which must lie in it: a name that leads elsewhere, by its path or by a link, is
    refused. The hub's own cache is made of links from `snapshots/X/` to `blobs/` beside it, which are followed."""
    plain = len(Path(name).parts) == 1 and not Path(name).is_absolute() and name not in (".", "..")
    if not plain or "\0" in name or len(name.encode("utf-8", "surrogatepass")) > MAX_NAME:
        raise UserError(f"{folder} names the file {shorten(repr(name))}, which is not a file of that folder")
    home = Path(os.path.realpath(folder))  # unlike `resolve` it does not mind links in a circle
    file = Path(os.path.realpath(folder / name))
    allowed = [home]
    for above in (home.parent, home.parent.parent):  # the folder of a model, or one in it
        if above.name == "snapshots":
            allowed.append(above.parent / "blobs")
    if not any(file.is_relative_to(parent) for parent in allowed):
        raise UserError(f"{folder / name} is a link to {file}, outside its folder; put the file itself there")
    return folder / name


def shorten(text: str, most: int = 80) -> str:
    """For a sentence, which is no place for megabytes or for half of a character."""
    text = " ".join(text.encode("utf-8", "backslashreplace").decode().split())
    return text if len(text) <= most else text[: most - 1] + "…"


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")


def _check_values(value: Any, where: str) -> None:
    """Bounds on what a parser has made, without recursion of our own."""
    level = [value]
    seen: set[int] = set()
    for _ in range(MAX_DEPTH):
        if not level:
            return
        below: list[Any] = []
        for one in level:
            if isinstance(one, str):
                _check_text(one, where)
            elif isinstance(one, int) and one.bit_length() > MAX_BITS:
                raise UserError(f"{where} holds a whole number with hundreds of digits")
            elif isinstance(one, dict | list | tuple | set) and id(one) not in seen:
                seen.add(id(one))
                if isinstance(one, dict):
                    below += one.keys()
                below += one.values() if isinstance(one, dict) else one
        level = below
    raise UserError(f"{where} is nested more than {MAX_DEPTH} levels deep")


def _check_text(text: str, where: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as err:
        raise UserError(f"{where} holds half of a character (a lone surrogate), which no file can keep") from err


def _count_nodes(document: yaml.Node | None, where: str) -> None:
    """Of a composed document, aliases written out; one that holds itself has no end."""
    counts: dict[int, int] = {}
    path: set[int] = set()

    def count(node: yaml.Node) -> int:
        if id(node) in counts:
            return counts[id(node)]
        if id(node) in path:
            raise UserError(f"{where} holds a list or a section that contains itself")
        if len(path) > MAX_DEPTH:
            raise UserError(f"{where} is nested more than {MAX_DEPTH} levels deep")
        path.add(id(node))
        below: list[yaml.Node] = []
        if isinstance(node, yaml.SequenceNode):
            below = node.value
        elif isinstance(node, yaml.MappingNode):
            below = [part for pair in node.value for part in pair]
        total = 1 + sum(count(part) for part in below)
        path.discard(id(node))
        counts[id(node)] = total
        if total > MAX_YAML_NODES:
            raise UserError(f"{where} holds more than {MAX_YAML_NODES:,} values; are its aliases meant?")
        return total

    if document is not None:
        count(document)


def _kind(value: Any) -> str:
    names = {"list": "list", "str": "text", "NoneType": "null", "bool": "truth value"}
    return names.get(type(value).__name__, "number")


def _shown(file: Path) -> str:
    return shorten(str(file), 200)


def _reason(err: Exception) -> str:
    return shorten(err.strerror if isinstance(err, OSError) and err.strerror else str(err), 200)
