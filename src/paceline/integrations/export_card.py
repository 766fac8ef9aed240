"""The model card of an export: what it belongs to, what it was trained on, how it does. What is not known is not said
to be known."""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from paceline.config import Config
from paceline.integrations.export_formats import ExportedDrafter
from paceline.integrations.export_source import Source
from paceline.lora.shape import LoraShape
from paceline.model.weights import weight_files
from paceline.observe.metrics import read_lines
from paceline.version import __version__

LAST_STEPS = 10


@dataclass
class Measured:
    """Accept length, measured by decoding prompts."""

    task: str
    unseen: bool
    """Whether training has not seen the prompts."""
    prompts: int
    depth: int
    rows: list[dict[str, Any]]


def digest(folder: Path) -> str:
    """Of the policy's weights: the same as `cat` of its safetensors files in order, through sha256sum."""
    sha = hashlib.sha256()
    for file in weight_files(folder):
        with open(file, "rb") as f:
            while block := f.read(1 << 24):
                sha.update(block)
    return sha.hexdigest()


def drafter_card(source: Source, d: ExportedDrafter, form: str, out: Path, measured: Measured | None, sha: str) -> str:
    c = d.policy
    window = d.config["paceline"]["window"]
    drafted = "every token" if not d.maps else f"{d.config['draft_vocab_size']:,} of {c.vocab_size:,} tokens"
    head = "of its own" if d.config["paceline"]["head"] == "own" else "the policy's"
    step = f" after {source.step} steps of the run `{source.run}`" if source.run else ""
    return "\n".join(
        [
            _front(d.policy_name, ["eagle3", "speculative-decoding", "paceline"]),
            "# A drafter in EAGLE-3 form",
            "",
            f"It drafts for one policy, `{d.policy_name}`{step}.",
            "The policy verifies every draft token, so completions stay the policy's. For another policy few draft",
            "tokens are accepted, which costs speed only.",
            "",
            "| | |",
            "|---|---|",
            f"| policy | `{d.policy_name}`: {c.family}, {c.layers} layers, {c.hidden_size} wide, "
            f"{c.vocab_size:,} tokens |",
            f"| its weights | sha256 `{sha}` (all .safetensors files in order) |",
            f"| features | what enters layers {', '.join(map(str, d.taps))} |",
            f"| draft vocabulary | {drafted}; head: {head} |",
            f"| positions | {c.max_positions:,}, as the policy |",
            f"| window | {window:,} tokens |",
            f"| precision | {d.config['dtype']} |",
            "",
            "## Accept length",
            "",
            *_accept_length(source, measured),
            "",
            "## Trained on",
            "",
            *_training(source, d),
            "",
            "## Serving",
            "",
            *_serving(d, form, out),
            "",
            *_versions(f"format `{form}`"),
        ]
    )


def policy_card(source: Source, name: str, sha: str) -> str:
    lines = [_front(None, ["paceline"]), f"# {name}", ""]
    if source.run and source.config:
        config = source.config
        rows = _rows(source)
        lines += [
            f"`{config.model.path}` after {source.step} steps of reinforcement learning with Paceline",
            f"({config.learn.algorithm}, learning rate {config.learn.lr:g}) on {describe_task(config)}, from the run",
            f"`{source.run}`.",
            "",
        ]
        rewards = [row["critic/rewards/mean"] for row in rows if "critic/rewards/mean" in row]
        if rewards:
            third = max(1, len(rewards) // 3)
            first, last = sum(rewards[:third]) / third, sum(rewards[-third:]) / third
            lines += [
                f"Mean reward in training: {first:.3f} in the first third of the steps, {last:.3f} in the last.",
                "",
            ]
    return "\n".join([*lines, f"Weights: sha256 `{sha}` (all .safetensors files in order).", "", *_versions("")])


def adapter_card(source: Source, shape: LoraShape, base: str, name: str) -> str:
    trained = f" after {source.step} steps of the run `{source.run}`" if source.run else ""
    return "\n".join(
        [
            _front(base, ["lora", "peft", "paceline"]),
            f"# {name}",
            "",
            f"A LoRA adapter for `{base}`{trained}: rank {shape.rank}, alpha {shape.alpha:g},",
            f"for {', '.join(shape.targets)}.",
            "",
            "```python",
            "from peft import PeftModel",
            f"model = PeftModel.from_pretrained(base, {json.dumps(name)})",
            "```",
            "",
            *_versions(""),
        ]
    )


def _front(base: str | None, tags: list[str]) -> str:
    named = [f"base_model: {json.dumps(base)}"] if base else []
    return "\n".join(["---", *named, "tags:", *(f"- {tag}" for tag in tags), "---", ""])


def _accept_length(source: Source, measured: Measured | None) -> list[str]:
    if measured:
        seen = "which training has not seen" if measured.unseen else "some of which training may have seen"
        lines = [
            f"Measured by Paceline's engine on {measured.prompts} prompts of {measured.task}, {seen},",
            f"with chains of {measured.depth} draft tokens; the bonus token is counted.",
            "",
            "| temperature | accept length |",
            "|---|---|",
        ]
        return lines + [f"| {row['temperature']:g} | {row['accept_length']:.2f} |" for row in measured.rows]
    rows = [row for row in _rows(source) if "rollout/spec_accept_length" in row][-LAST_STEPS:]
    rounds = sum(row.get("rollout/spec_rounds", 0) for row in rows)
    if source.drafter_of_run and source.config and rounds:
        mean = sum(row["rollout/spec_accept_length"] * row["rollout/spec_rounds"] for row in rows) / rounds
        return [
            f"| temperature | accept length |\n|---|---|\n| {source.config.rollout.temperature:g} | {mean:.2f} |",
            "",
            f"From the last {len(rows)} steps of the run, with the strategies that its tuner chose, the suffix",
            "drafter's among them. `paceline export --measure` measures this drafter alone.",
        ]
    return ["Not measured: `paceline export --measure` does it."]


def _training(source: Source, d: ExportedDrafter) -> list[str]:
    lines = []
    known = d.config["paceline"].get("trained")
    if known:
        how = [f"{known[name]:,} {name}" for name in ("tokens", "steps") if name in known]
        lines.append(f"{known['answers']:,} answers of `{known['policy']}` to {known['task']} ({', '.join(how)}).")
    if source.drafter_of_run and source.config:
        began = source.config.speculation.drafter
        began = {"new": "untrained", "auto": f"as the drafter of `{source.config.model.path}`"}.get(
            str(began), f"as `{began}`"
        )
        versions = max((int(row.get("drafter/version", 0)) for row in _rows(source)), default=0)
        lines.append(
            f"The policy's own answers to {describe_task(source.config)} during the run; it began {began}, and "
            f"{versions} versions were published in {source.step} steps."
        )
    return lines or ["Not recorded."]


def _serving(d: ExportedDrafter, form: str, out: Path) -> list[str]:
    window = d.window
    if form == "vllm":
        spec = f'{{"method": "eagle3", "model": "{out}", "num_speculative_tokens": {d.depth}}}'
        lines = [f"vllm serve {d.policy_name} --speculative-config '{spec}'"]
    elif form == "speculators":
        lines = [f"vllm serve {out}"]
    elif form == "sglang":
        lines = [
            f"python -m sglang.launch_server --model-path {d.policy_name} --speculative-algorithm EAGLE3 \\",
            f"    --speculative-draft-model-path {out} --speculative-num-steps {d.depth} \\",
            f"    --speculative-eagle-topk 1 --speculative-num-draft-tokens {d.depth + 1}"
            + (f" --speculative-draft-window-size {window}" if window else ""),
        ]
    else:
        lines = [f"paceline train model.path={d.policy_name} speculation.drafter={out}"]
    lines = ["```sh", *lines, "```"]
    if window and form != "paceline":
        where = {"sglang": "the command above says so"}.get(form, "`sliding_window` in the config says so")
        lines += [
            "",
            f"It attends to the last {window:,} tokens, because that is how it was trained: {where}. An engine that",
            "ignores it lets it attend to everything, and in longer sequences fewer draft tokens are accepted.",
        ]
    return lines


def _versions(form: str) -> list[str]:
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "safetensors"))
    rest = f"; {form}" if form else ""
    return [f"Written by paceline {__version__} (Python {platform.python_version()}, {packages}){rest}.", ""]


def describe_task(config: Config) -> str:
    name = config.task.name
    return f"{name} ({config.task.difficulty})" if name == "countdown" else f"`{name}`"


def _rows(source: Source) -> list[dict[str, Any]]:
    rows = read_lines(source.run / "metrics.jsonl") if source.run else []
    return [row for row in rows if source.step is None or row["step"] <= source.step]
