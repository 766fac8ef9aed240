"""The memory plan knows adapters: what they take, where the base goes, what fits which card."""

from __future__ import annotations

import re

import pytest
import torch
import yaml

from paceline.config import RECIPES, Config, build_config, load_config
from paceline.errors import UserError
from paceline.learn.algorithms import resolve
from paceline.learn.learner import Learner
from paceline.lora.memory import choose_base, with_base
from paceline.lora.start import begin_lora, decide_lora
from paceline.model import DecoderConfig, load_model
from paceline.setup.memory import DeviceMemory, MemoryPlan, check_fit, filled, plan_memory
from paceline.setup.memory_fit import check_base

from ..test_memory import H200, LONG, SEVEN, bytes_of, settings

ONE_AND_A_HALF = SEVEN | {
    "hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 2, "intermediate_size": 8960,
    "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip


def planned(config: Config, shape: dict, memory: DeviceMemory) -> tuple[Config, MemoryPlan]:
    again = lambda c: plan_memory(c, DecoderConfig.from_hf(shape), memory)  # noqa: E731
    config = choose_base(decide_lora(config, resumed=False), memory.cuda, again)
    return config, again(config)


def card(size: float) -> DeviceMemory:
    return DeviceMemory(f"a card of {size:g} GB", int(size * 1e9), True)


def recipe(**changes: object) -> Config:
    """The one that ships, for a model without a drafter."""
    values = yaml.safe_load((RECIPES / "lora-7b-24gb.yaml").read_text(encoding="utf-8"))
    values["model"]["path"] = "embedded"
    values["speculation"]["drafter"] = "none"
    values["cluster"] = {"workers": 1}
    values["learn"] |= changes
    return resolve(build_config(values, "lora-7b-24gb"))


def test_the_parts_are_what_they_take():
    config = settings("cluster.workers=1", "spot.when='off'", "learn.lora.rank=8", "learn.kl_coef=0.1")
    model = load_model("embedded")
    config, plan = planned(config, model.config.hf, DeviceMemory("here", 10**11, False))
    lora = begin_lora(model, config, None)
    learner = Learner(model, config, lora=lora)
    parts = plan.parts
    assert plan.lora_base == "device", "a CPU has one memory"
    assert parts["base"] == bytes_of(lora.base.weights.values())
    assert parts["adapters"] == parts["gradients"] == bytes_of(lora.parameters.values())
    assert parts["optimizer"] == sum(bytes_of(learner.optimizer.tensors(n)) for n in learner.optimizer.mean)
    assert "reference" not in parts and learner.reference is None, "the reference is the base"
    assert (
        parts["optimizer"]
        < 0.2
        * plan_memory(
            settings("cluster.workers=1", "spot.when='off'"), model.config, DeviceMemory("here", 10**11, False)
        ).parts["optimizer"]
    )


@pytest.mark.parametrize(("size", "base"), [(24, "host"), (40, "device")])
def test_a_7b_trains_on_one_card(size, base):
    config, plan = planned(recipe(), SEVEN, card(size))
    assert plan.fits and plan.total <= size * 1e9 and plan.lora_base == config.learn.lora.base == base
    assert plan.kv_tokens > 16 * 1536, "many answers at once"
    assert filled(recipe(), plan).learn.lora.base == base
    all_weights, without = planned(recipe(lora={}), SEVEN, card(80))
    assert not without.fits and all_weights.learn.lora.base is None and without.lora_base is None


def test_a_1_5b_trains_on_a_small_card():
    config, plan = planned(recipe(), ONE_AND_A_HALF, card(12))
    assert plan.fits and plan.kv_tokens > 16 * 1536
    short = config.rollout.model_copy(update={"max_tokens": 512})
    learn = recipe(micro_tokens=1024).learn
    config, plan = planned(config.model_copy(update={"rollout": short, "learn": learn}), ONE_AND_A_HALF, card(8))
    assert plan.fits and plan.lora_base == "host"


def test_the_base_goes_where_the_rollout_keeps_its_room():
    words = [*LONG, "learn.lora.rank=32", "learn.activation_checkpointing=true"]
    _, plan = planned(settings(*words), SEVEN, H200)
    assert plan.lora_base == "device" and plan.parts["base"] == pytest.approx(13.05e9, rel=0.01)
    near = planned(settings(*words, "learn.lora.base=device"), SEVEN, card(44))[1]
    far = planned(settings(*words, "learn.lora.base=host"), SEVEN, card(44))[1]
    assert near.fits and "base" not in far.parts and far.kv_tokens > 2 * near.kv_tokens
    assert planned(settings(*words), SEVEN, card(44))[1].lora_base == "host"
    one = planned(settings(*words, "learn.lora.targets=[q_proj,v_proj]"), SEVEN, H200)[1]
    assert one.parts["base"] == 28 * 3584 * (3584 + 512) * 2 and one.parts["adapters"] < plan.parts["adapters"] / 4


def test_adapters_are_proposed_where_all_weights_do_not_fit():
    shape = DecoderConfig.from_hf(SEVEN)
    again = lambda config: plan_memory(config, shape, card(40))  # noqa: E731
    config = settings(*LONG, "learn.activation_checkpointing=true")
    with pytest.raises(UserError, match=r"a card of 40 GB has 40\.0: set .*learn\.lora\.rank=32"):
        check_fit(again(config), config, again)
    config = with_base(settings(*LONG, "learn.activation_checkpointing=true", "learn.lora.rank=32"), "device")
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"max_batch": 32})})
    small = lambda config: plan_memory(config, shape, card(28))  # noqa: E731
    with pytest.raises(UserError, match=r"learn\.lora\.base=host"):
        check_fit(small(config), config, small)


def test_a_base_that_the_host_has_no_room_for_is_refused():
    config = load_config(None, ["learn.lora.rank=8", "cluster.workers=2"])
    with pytest.raises(UserError, match=r"keeps 13\.0 GB for every worker .* has 20\.0 GB; set learn\.lora\.base=dev"):
        check_base(config, int(13e9), int(20e9))
    check_base(config, int(13e9), int(27e9))


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["learn.lora.targets=[lm_head]"], "learn.lora.targets"),
        (["learn.lora.targets=[]"], "learn.lora.targets"),
        (["learn.lora.rank=-1"], "learn.lora.rank"),
        (["learn.lora.alpha=0"], "learn.lora.alpha"),
        (["learn.lora.rank=0", "learn.lora.path=somewhere"], "rank = 0 trains without any; leave rank out"),
        (["learn.lora=8"], "learn.lora"),
    ],
    ids=str,
)
def test_settings_that_make_no_sense(words, problem):
    with pytest.raises(UserError, match=re.escape(problem)):
        load_config(None, words)


def test_zero_is_off():
    config, plan = planned(settings("learn.lora.rank=0", "cluster.workers=1"), ONE_AND_A_HALF, card(80))
    assert plan.lora_base is None and "adapters" not in plan.parts
    assert begin_lora(torch.nn.Module(), config, None) is None  # type: ignore[arg-type]
