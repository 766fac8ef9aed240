"""Sample answers of a run with their rewards: of its first and of its last step."""

from __future__ import annotations

import html
import json
from typing import Any

from paceline.report.rundata import RunData
from paceline.report.svg import number

MAX_TEXT = 4000  # characters of a prompt or an answer on the page


def samples_section(run: RunData) -> str:
    """Nothing for a run that keeps none."""
    if not run.samples:
        return ""
    steps = sorted({row["step"] for row in run.samples})
    shown = [steps[-1], *steps[:1]] if len(steps) > 1 else steps
    parts = ["<h2>Sample answers</h2>"]
    for step in shown:
        parts.append(f"<h3>Step {step}</h3>")
        parts += [_sample(row) for row in run.samples if row["step"] == step]
    return f'<div id="samples">{"".join(parts)}</div>'


def _sample(row: dict[str, Any]) -> str:
    reward = "no reward" if row["reward"] is None else f"reward {number(row['reward'])}"
    cut = ", cut at max_tokens" if row.get("finish") == "length" else ""
    logged = "".join(
        f", {html.escape(name)} {html.escape(_shown(value))}" for name, value in row.get("extra", {}).items()
    )
    first = _short(_text(row["prompt"]).strip().split("\n")[0])
    summary = f"<summary><b>{reward}</b>{cut}{logged} · {html.escape(first)}</summary>"
    prompt = html.escape(_cut(_text(row["prompt"])))
    written = html.escape(_cut(row["answer"]))
    return f'<details class="sample">{summary}<pre>{prompt}</pre><pre class="written">{written}</pre></details>'


def _text(prompt: Any) -> str:
    """Messages as lines with their roles."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and all(isinstance(one, dict) for one in prompt):
        return "\n".join(f"{one.get('role', '')}: {_plain(one.get('content', ''))}" for one in prompt)
    return _plain(prompt)


def _plain(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def _shown(value: Any) -> str:
    return number(value) if isinstance(value, int | float) and not isinstance(value, bool) else _short(str(value))


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:79] + "…"


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}… ({len(text) - MAX_TEXT:,} more characters)"
