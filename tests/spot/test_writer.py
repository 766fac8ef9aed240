"""The newest drafter is written while other things go on, and whole at every moment."""

from __future__ import annotations

import threading

import pytest
import torch

import paceline.spot.writer as writer_module
from paceline.config import load_config
from paceline.draft.eagle.files import load_drafter
from paceline.draft.eagle.model import DrafterShape, EagleModel
from paceline.loop import train
from paceline.spot.writer import DrafterWriter

from ..conftest import tiny_model


@pytest.fixture
def drafter() -> EagleModel:
    return EagleModel(tiny_model(dtype=torch.float32), DrafterShape(64, 32)).init_weights(0)


def test_the_newest_is_kept_as_it_was_when_it_was_handed_over(tmp_path, drafter, monkeypatch):
    go, write = threading.Event(), writer_module.write_files

    def slow(files, folder):
        assert go.wait(60)
        write(files, folder)

    monkeypatch.setattr(writer_module, "write_files", slow)
    writer = DrafterWriter(tmp_path / "drafter")
    first = drafter.fc.clone()
    assert writer.write(drafter), "it returns while the file is not there yet"
    assert not (tmp_path / "drafter").exists()
    drafter.fc.data.mul_(2)  # training goes on
    assert not writer.write(drafter), "one at a time"
    go.set()
    writer.wait()
    assert torch.equal(load_drafter(tmp_path / "drafter", drafter.policy).fc, first)
    assert writer.write(drafter)
    writer.wait()
    assert torch.equal(load_drafter(tmp_path / "drafter", drafter.policy).fc, drafter.fc)
    assert sorted(f.name for f in (tmp_path / "drafter").iterdir()) == ["config.json", "model.safetensors"]


def test_what_cannot_be_written_is_said(tmp_path, drafter):
    (tmp_path / "drafter").write_text("a file where a folder should be")
    writer = DrafterWriter(tmp_path / "drafter")
    writer.write(drafter)
    with pytest.raises(OSError, match="drafter"):
        writer.wait()


def test_what_cannot_be_written_last_is_told_when_the_process_ends(tmp_path, drafter, capsys):
    (tmp_path / "drafter").write_text("a file where a folder should be")
    writer = DrafterWriter(tmp_path / "drafter")
    writer.write(drafter)
    writer.close()
    assert "could not be written" in capsys.readouterr().err
    writer.close()
    assert not capsys.readouterr().err, "once"


def test_a_disk_that_does_not_answer_is_waited_for_only_so_long(tmp_path, drafter, monkeypatch):
    go, write = threading.Event(), writer_module.write_files

    def stuck(files, folder):
        assert go.wait(60)
        write(files, folder)

    monkeypatch.setattr(writer_module, "write_files", stuck)
    writer = DrafterWriter(tmp_path / "drafter", deadline_s=0.05)
    writer.write(drafter)
    for _ in range(2):
        with pytest.raises(TimeoutError, match="not written"):
            writer.wait()
    assert not writer.write(drafter), "the first one is still being written"
    go.set()
    writer.deadline_s = 60.0
    writer.wait()
    assert (tmp_path / "drafter" / "model.safetensors").is_file()


def test_a_run_leaves_its_newest_drafter(tmp_path):
    """Also before its first checkpoint."""
    words = "steps=3 rollout.prompts=4 rollout.samples=4 rollout.max_tokens=60 cluster.workers=1 model.threads=1 "
    words += "speculation.drafter=new spot.when=update spot.share=0.5 checkpoint.every=0 log.tensorboard=false"
    _, rows = train(load_config(None, [*words.split(), f"run_dir={tmp_path / 'run'}"]))
    assert rows[-1]["drafter/version"] > 0
    assert (tmp_path / "run" / "drafter" / "model.safetensors").is_file()
