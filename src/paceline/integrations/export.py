"""`paceline export`: the drafter as other engines load it, or the policy as a Hugging Face checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from rich.console import Console
from safetensors.torch import save_file

from paceline.config import load_config
from paceline.draft.eagle.checkpoint import read_eagle3
from paceline.draft.eagle.files import WEIGHTS, load_drafter
from paceline.errors import UserError
from paceline.files.reading import inside
from paceline.integrations.export_card import Measured, describe_task, digest, drafter_card, policy_card
from paceline.integrations.export_folder import whole_folder
from paceline.integrations.export_formats import FORMATS, gather, make_files
from paceline.integrations.export_source import Source, find_source
from paceline.model.checkpoint import EMBEDDED, check_model, load_model, read_config
from paceline.model.tokenizer import load_tokenizer
from paceline.model.weights import INDEX, read_index, read_weights, weight_files
from paceline.setup.device import choose_device

TEMPERATURES = (0.0, 0.6, 1.0)


def export_drafter(
    what: str,
    out: Path,
    form: str = "vllm",
    model: str | None = None,
    policy_name: str | None = None,
    depth: int = 5,
    measure: int = 0,
    settings: list[str] | None = None,
) -> dict[str, Any]:
    """Write a drafter for an engine, with its card -> what was written. It is tried on `measure` prompts."""
    if form not in FORMATS:
        raise UserError(f"--format is '{form}', but must be one of: {', '.join(FORMATS)}")
    source = find_source(what, model)
    if source.drafter is None:
        raise UserError(f"{what} has no drafter; train one with `paceline draft train --model {source.policy}`")
    if source.config and settings:
        raise UserError("a run is measured with its own settings, so --set goes with a model or a drafter only")
    name = policy_name or str(source.policy.resolve())
    drafter = gather(read_eagle3(source.drafter), source.policy, read_config(source.policy), name, depth)
    config, tensors = make_files(drafter, form)
    with whole_folder(out) as aside:
        (aside / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        save_file({n: t.contiguous() for n, t in tensors.items()}, aside / WEIGHTS, metadata={"format": "pt"})
        measured = _measure(source, aside, measure, depth, settings or []) if measure else None
        sha = digest(source.policy)
        (aside / "README.md").write_text(drafter_card(source, drafter, form, out, measured, sha), encoding="utf-8")
    accept = {f"{row['temperature']:g}": row["accept_length"] for row in measured.rows} if measured else None
    return {"out": str(out), "format": form, "policy": name, "policy_sha256": sha, "accept_length": accept}


def export_policy(what: str, out: Path) -> dict[str, Any]:
    """Write the policy with its tokenizer, chat template and generation settings."""
    source = find_source(what)
    found = check_model(source.policy)
    tokenizer = load_tokenizer(str(source.policy))
    for _ in read_weights(found, found):  # each is checked as it is read
        pass
    copied = [inside(source.policy, "config.json"), *weight_files(source.policy)]
    if read_index(source.policy) is not None:
        copied.append(inside(source.policy, INDEX))
    with whole_folder(out) as aside:
        for file in copied:
            shutil.copyfile(file, aside / file.name)
        tokenizer.save(aside)
        sha = digest(aside)
        (aside / "README.md").write_text(policy_card(source, out.resolve().name, sha), encoding="utf-8")
    return {"out": str(out), "format": "policy", "policy_sha256": sha, "step": source.step}


def export_command(what: str, out: Path, policy: bool, adapter: bool, as_json: bool = False, **options: Any) -> None:
    from paceline.integrations.export_adapter import export_adapter

    if policy and adapter:
        raise UserError("--policy exports the merged weights and --adapter the adapters alone; name one of them")
    console = Console(highlight=False, stderr=as_json)
    if adapter:
        result = export_adapter(what, out, options["policy_name"])
    else:
        result = export_policy(what, out) if policy else export_drafter(what, out, **options)
    console.print(f"wrote {out}; its card is {out / 'README.md'}", soft_wrap=True, markup=False)
    if as_json:
        print(json.dumps(result))


def _measure(source: Source, drafter: Path, prompts: int, depth: int, settings: list[str]) -> Measured:
    """Answer prompts of the run's task with what was just written."""
    from paceline.commands.draft import measure_acceptance

    policy_path = str(source.policy)
    model = "embedded" if source.policy == EMBEDDED else policy_path
    config = source.config or load_config(None, [f"model.path={model}", *settings])
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": policy_path})})
    policy = load_model(policy_path, config.model.dtype, choose_device(config.model.device))
    tokenizer = load_tokenizer(policy_path, config.task.chat_template_kwargs)
    brought = load_drafter(drafter, policy)
    rows = [measure_acceptance(config, policy, tokenizer, brought, prompts, t, depth) for t in TEMPERATURES]
    generated = config.task.name == "countdown" or config.task.name.startswith("gym:")  # others are visited in full
    return Measured(describe_task(config), generated, prompts, depth, rows)
