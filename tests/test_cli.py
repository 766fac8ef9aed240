"""The commands as a user types them, in processes of their own."""

from __future__ import annotations

import json
import os
import pty
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .conftest import tiny_config, tiny_model
from .digits import DIGITS

QUICK = [
    "steps=4", "rollout.prompts=2", "rollout.samples=2", "rollout.max_tokens=30", "checkpoint.every=2",
    "log.tensorboard=false", "model.threads=1", "cluster.workers=1", "learn.lr=1e-4", DIGITS,
]  # fmt: skip


def paceline(*words: str, cwd: Path | None = None, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "paceline", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=600, **options)


def here(*words: str) -> int:
    """The same command in this process, for tests of what it says rather than of how it ends."""
    from paceline import cli

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["paceline", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            cli.main()
    return end.value.code or 0


def rows(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_train_leaves_a_whole_run(tmp_path, capsys):
    run = tmp_path / "run"
    done = paceline("train", *QUICK, f"run_dir={run}", "log.tensorboard=true")
    assert done.returncode == 0, done.stderr
    assert "step 4/4" in done.stdout and "by thirds" in done.stdout
    assert done.stdout.startswith("settings: the recipe default (the embedded reasoner on Countdown)\n")
    assert str(run) in re.sub(r"\s", "", done.stdout), "the path may be folded, but it is whole"
    metrics = rows(run)
    assert [row["step"] for row in metrics] == [1, 2, 3, 4]
    wanted = {
        "timing_s/gen",
        "timing_s/update_actor",
        "timing_s/step",
        "response_length/mean",
        "critic/rewards/mean",
    }
    assert wanted <= metrics[0].keys() and any(name.endswith("digits.py:digits") for name in metrics[0])
    assert any(row["actor/grad_norm"] > 0 for row in metrics)
    assert list((run / "tensorboard").iterdir()) and (run / "samples.jsonl").read_text().count("\n") == 4 * 2
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-000002", "step-000004"]
    newest = run / "checkpoints" / "step-000004"
    assert here("generate", newest, "--prompt", "Make 6 from 1 2 3.", "--max-tokens", "5") == 0
    assert capsys.readouterr().out.strip()
    assert here("train", *QUICK, f"run_dir={run}") == 2
    assert "holds a run already" in capsys.readouterr().err


def test_the_same_seed_gives_the_same_run_and_another_does_not(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert here("train", *QUICK, "model.dtype=float64", f"run_dir={tmp_path / name}", f"seed={seed}") == 0
    samples = [(tmp_path / name / "samples.jsonl").read_text() for name in "abc"]
    assert samples[0] == samples[1] != samples[2]
    norms = [[row["actor/grad_norm"] for row in rows(tmp_path / name)] for name in "abc"]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6) and norms[0] != pytest.approx(norms[2], rel=1e-3)


GPT2 = {"model_type": "gpt2", "vocab_size": 50257, "hidden_size": 64, "max_position_embeddings": 1024}
BAD_INPUT = {
    "unknown key": (["rollout.sampels=1"], "did you mean 'rollout.samples'"),
    "wrong type": (["rollout.samples=x"], "'rollout.samples'"),
    "out of range": (["rollout.top_p=2"], "'rollout.top_p'"),
    "no such model folder": (["model.path=./nothing/here"], "no model folder at ./nothing/here"),
    "folder without weights": (["model.path={tmp}/empty"], "has no weights"),
    "folder without config": (["model.path={tmp}/bare"], "has no config.json"),
    "unknown family": (["model.path={tmp}/gpt2"], "of family 'gpt2'"),
    "missing tensors": (["model.path={tmp}/partial"], "lacks"),
    "no tokenizer": (["model.path={tmp}/wordless"], "tokenizer"),
    "data without prompts": (
        ["task.name={tmp}/data.jsonl", "reward.functions=[{{function: math}}]"],
        "no column 'prompt'",
    ),
    "data without a reward": (["task.name={tmp}/good.jsonl"], "brings no reward of its own"),
    "reward that is not there": (["reward.functions=[{{function: 'no.where:f'}}]"], "cannot be imported"),
    "no such device": (["model.device=cuda:7"], "CUDA devices"),
    "prompt too long": (["task.max_prompt_tokens=3"], "have more than 3 tokens"),
    "unknown difficulty": (["task.difficulty=silly"], "easy, medium"),
    "too little memory": (["rollout.kv_memory_gb=0.000001"], "rollout.kv_memory_gb"),
    "no run to resume": (["--resume", "{tmp}/empty"], "is not a run directory"),
    "two recipes": (["default", "other"], "two recipes"),
    "no such recipe": (["{tmp}/none.yaml"], "no recipe at"),
}


@pytest.fixture(scope="module")
def bad(tmp_path_factory):
    from safetensors.torch import load_file, save_file

    from paceline.model import save_model

    tmp = tmp_path_factory.mktemp("bad")
    for name in ("empty", "bare", "gpt2"):
        (tmp / name).mkdir()
    (tmp / "empty" / "config.json").write_text(json.dumps(tiny_config()))
    (tmp / "gpt2" / "config.json").write_text(json.dumps(GPT2))
    for name in ("partial", "wordless"):
        save_model(tiny_model(), tmp / name)
    tensors = load_file(tmp / "partial" / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, tmp / "partial" / "model.safetensors")
    from paceline.model.tokenizer import load_tokenizer

    for name in ("empty", "partial"):
        load_tokenizer("embedded").save(tmp / name)
    (tmp / "data.jsonl").write_text('{"question": "x"}\n')
    (tmp / "good.jsonl").write_text('{"prompt": "x"}\n')
    return tmp


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_sentence_and_exit_code_2(case, bad, tmp_path, capsys):
    words, problem = BAD_INPUT[case]
    words = [w.format(tmp=bad) for w in words]
    extra = [] if "--resume" in words else [f"run_dir={tmp_path / 'run'}"]
    assert here("train", *words, *extra) == 2
    said = capsys.readouterr().err
    assert problem in said and said.startswith("paceline: ")
    assert said.count("\n") == 1, "one sentence, no traceback"
    assert not (tmp_path / "run").exists(), "nothing is left behind"


def test_bad_input_in_a_process_of_its_own(tmp_path):
    done = paceline("train", "model.path=./nothing/here", f"run_dir={tmp_path / 'run'}", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr == (
        "paceline: no model folder at ./nothing/here; name a folder, a hub id such as owner/name, or 'embedded'\n"
    )


REWARD = """
import time
def f(prompts, completions, **columns):
    if {condition}:
        {act}
    return [1.0] * len(completions)
"""


@pytest.mark.parametrize(
    ("act", "problem"),
    [
        ("raise ValueError('oops')", "raised ValueError: oops"),
        ("return [float('nan') for _ in completions]", "returned nan"),
        ("time.sleep(99)", "took longer"),
    ],
)
def test_a_reward_that_fails_stops_the_run_after_saving(act, problem, tmp_path):
    """The second step's answers fail; the first step's work is kept, and the run can be resumed once it is fixed."""
    reward, run = tmp_path / "mine.py", tmp_path / "run"
    marker = tmp_path / "broken"
    text = REWARD.format(condition=f"__import__('os').path.exists({str(marker)!r})", act=act)
    reward.write_text(text)
    words = [
        *QUICK,
        "steps=2",
        f"run_dir={run}",
        f"reward.functions=[{{function: '{reward}:f'}}]",
        f"reward.timeout_s={2 if 'sleep' in act else 30}",
    ]
    marker.touch()
    done = paceline("train", *words)
    assert done.returncode == 1 and problem in done.stderr
    assert (
        "mine.py:f" in done.stderr and "sample 0 of countdown" in done.stderr
    ) or "sample 1 of countdown" in done.stderr
    assert f"--resume {run}" in done.stderr and (run / "checkpoints").exists()
    marker.unlink()
    assert here("train", "--resume", run) == 0
    assert [row["step"] for row in rows(run)] == [1, 2]


def test_a_reward_that_fails_can_count_as_a_value(tmp_path, capsys):
    reward, run = tmp_path / "mine.py", tmp_path / "run"
    reward.write_text(REWARD.format(condition="columns['target'][0] % 2", act="raise ValueError('odd')"))
    words = [*QUICK, f"run_dir={run}", f"reward.functions=[{{function: '{reward}:f'}}]"]
    assert here("train", *words, "reward.on_error=value", "reward.error_value=-3") == 0
    metrics = rows(run)
    assert min(row["critic/rewards/min"] for row in metrics) == -3 and any("reward/errors" in row for row in metrics)
    assert "counted as -3" in capsys.readouterr().out


def test_losses_that_are_not_finite_stop_the_run(tmp_path):
    reward, run = tmp_path / "mine.py", tmp_path / "run"
    reward.write_text("def f(completions, completion_ids, **_): return [float(sum(i) % 7) for i in completion_ids]")
    words = [*QUICK, "steps=9", f"run_dir={run}", f"reward.functions=[{{function: '{reward}:f'}}]"]
    done = paceline("train", *words, "learn.lr=1e30", "learn.max_bad_updates=2")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "2 updates in a row were not finite" in done.stderr and "update was skipped" in done.stdout


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path):
    run = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", "train", *QUICK, "steps=100000", f"run_dir={run}"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_for(lambda: (run / "metrics.jsonl").exists() and len(rows(run)) >= 3, process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    done = int(re.search(r"stopped after step (\d+)", err).group(1))
    assert f"paceline train --resume {run}" in err and "Traceback" not in err
    assert (run / "checkpoints" / f"step-{done:06d}" / "state.json").exists()


def wait_for(condition, process, seconds=300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "the run did not get that far"
        time.sleep(0.05)


def limit_file_size() -> None:
    """Files cannot grow beyond 1 MB: what a full disk looks like to a program that is about to write a checkpoint."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, 10**6))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_disk_that_fills_up_keeps_the_last_checkpoint(tmp_path, workers):
    run = tmp_path / "run"
    assert here("train", *QUICK, "steps=2", f"cluster.workers={workers}", f"run_dir={run}") == 0
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("steps: 2", "steps: 6"))
    before = (run / "checkpoints" / "step-000002" / "model.safetensors").read_bytes()
    done = paceline("train", "--resume", run, preexec_fn=limit_file_size)
    assert done.returncode == 1, done.stderr
    assert "could not be written" in done.stderr and "is intact" in done.stderr and done.stderr.count("\n") == 1
    assert (run / "checkpoints" / "step-000002" / "model.safetensors").read_bytes() == before
    assert here("train", "--resume", run) == 0
    assert [row["step"] for row in rows(run)] == [1, 2, 3, 4, 5, 6]


def test_a_full_disk_under_the_log(tmp_path, capsys, monkeypatch):
    """What opening the log gives is /dev/full: a write to it fails as on a full disk. A link to it would be refused."""

    def open_full(file: Path) -> int:
        return os.open("/dev/full", os.O_WRONLY) if file.name == "metrics.jsonl" else open_to_append(file)

    from paceline.files.writing import open_to_append

    monkeypatch.setattr("paceline.files.writing.open_to_append", open_full)
    assert here("train", *QUICK, f"run_dir={tmp_path / 'run'}") == 1
    said = capsys.readouterr().err
    assert "No space left" in said and said.count("\n") == 1


def test_what_is_left_of_another_run_is_not_written_over(tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").symlink_to("/dev/full")
    assert here("train", *QUICK, f"run_dir={run}") == 2
    said = capsys.readouterr().err
    assert "but metrics.jsonl of another run; name another run_dir" in said and said.count("\n") == 1
    assert os.listdir(run) == ["metrics.jsonl"]


def test_the_live_view_in_a_terminal(tmp_path):
    """A real terminal: progress, reward and time bar are drawn, and the table stands at the end."""
    parent, child = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
    words = [*QUICK, f"run_dir={tmp_path / 'run'}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", "train", *words], stdout=child, stderr=child, env=environment
    )
    os.close(child)
    seen = b""
    while True:
        try:
            part = os.read(parent, 65536)
        except OSError:
            break
        if not part:
            break
        seen += part
    assert process.wait() == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.decode())
    assert re.search(r"\d/4", text) and "tokens/s" in text and "rollout" in text and "by thirds" in text


def test_generate_is_reproducible(capsys):
    words = ["generate", "embedded", "--prompt", "Make 100 from 9 10 40 41.", "--max-tokens", "40", "--samples", "2"]
    said = []
    for extra in ([], [], ["--seed", "5"]):
        assert here(*words, *extra) == 0
        said.append(capsys.readouterr().out)
    assert "<think>" in said[0] and "--- 2 of 2" in said[0]
    assert said[0] == said[1] != said[2]


def test_doctor_settings_and_help(capsys):
    assert here("doctor") == 0
    assert {"torch", "CPU", "memory"} <= set(capsys.readouterr().out.split())
    assert here("settings") == 0
    assert "rollout.temperature" in capsys.readouterr().out
    assert here("--help") == 0
    assert "train" in capsys.readouterr().out
