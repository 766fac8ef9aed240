"""Same seed, same tokens: in engines that ask for it (`same_tokens`), vLLM draws and verifies by race, with whatever
drafter, depth or scheduler. Nothing is patched on disk, and other engines sample as vLLM does.

While a pass is sampled, a context variable says so, and the functions that vLLM's samplers call there answer otherwise
(`race`). All else stays vLLM's: logits processors, penalties, filters, log-probabilities.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch

from paceline.integrations.vllm.drafting import RUNNER, find
from paceline.integrations.vllm.race import (
    RACING,
    DrawnRows,
    RacedPass,
    by_row,
    key_of_seed,
    verify_first,
    verify_second,
)
from paceline.integrations.vllm.seeds import with_seed
from paceline.integrations.vllm.settings import SAME_TOKENS
from paceline.integrations.vllm.versions import installed_version, names_of

FIRST = "first"
SECOND = "second"
"""Of vLLM's model runners, as in the table of versions."""
FIRST_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
FIRST_FILTERS = "vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler"
FIRST_VERIFIER = "vllm.v1.sample.rejection_sampler"
SECOND_VERIFIER = "vllm.v1.worker.gpu.spec_decode.rejection_sampler"
SECOND_SAMPLER = "vllm.v1.worker.gpu.sample.gumbel:gumbel_sample"
log = logging.getLogger("vllm.paceline")
_racing: set[str] = set()


def wanted(vllm_config: Any) -> bool:
    """Whether this engine is to sample by race."""
    given = vllm_config.additional_config
    ours = given.get("paceline") if isinstance(given, Mapping) else None
    return isinstance(ours, Mapping) and bool(ours.get(SAME_TOKENS))


def racing_worker(init: Any) -> Any:
    """The constructor of vLLM's workers: where the race is wanted it is put into the model runner that they will make.
    A runner that it was not tested in, or that has names which have moved, samples as vLLM does, with one warning."""

    @functools.wraps(init)
    def init_with_race(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        init(self, vllm_config, *args, **kwargs)
        if not wanted(vllm_config):
            return
        runner = SECOND if vllm_config.use_v2_model_runner else FIRST
        why = _install(runner)
        if why is not None:
            log.warning("tokens are drawn as vLLM draws them, and speculation may change them: %s", why)

    return init_with_race


def racing_runners() -> set[str]:
    """The model runners of this process into which the race was put."""
    return set(_racing)


@functools.cache
def _install(runner: str) -> str | None:
    """Once per process -> None, or why not."""
    found = installed_version()
    if runner not in names_of(found)[0].raced:
        return f"Paceline's race was not tested in the {runner} model runner of vLLM {found}"
    try:
        if runner == SECOND:
            _install_second()
        else:
            _install_first()
        _racing.add(runner)
    except (ImportError, AttributeError) as err:
        return f"a name of vLLM {found} has moved ({err})"
    return None


def seeding_core(preprocess: Any) -> Any:
    """See `seeds`."""
    return with_seed(preprocess, wanted)


# The second model runner


def _install_second() -> None:
    runner = find(RUNNER)
    verifier = import_module(SECOND_VERIFIER)
    sampled = second_verified(verifier.rejection_sample, second_sampler())
    runner.sample = second_sampling(runner.sample)
    verifier.rejection_sample = sampled  # type: ignore[attr-defined]


def second_sampler() -> Any:
    """vLLM's `gumbel_sample` as it draws from the policy: newer versions have other noise for drafts."""
    draw = find(SECOND_SAMPLER)
    newer = "is_drafting" in inspect.signature(draw).parameters
    return functools.partial(draw, is_drafting=False) if newer else draw


def second_sampling(sample: Any) -> Any:
    """A pass of the second model runner. Without draft tokens its own sampler draws, from the same noise, because every
    request has a seed."""

    @functools.wraps(sample)
    def sample_by_race(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not wanted(self.vllm_config):
            return sample(self, *args, **kwargs)
        token = RACING.set(RacedPass())
        try:
            return sample(self, *args, **kwargs)
        finally:
            RACING.reset(token)

    return sample_by_race


def second_verified(rejection_sample: Any, gumbel_sample: Any) -> Any:
    """What verifies in the second model runner. Acceptance that somebody has made up, and watermarks, are vLLM's."""

    @functools.wraps(rejection_sample)
    def verify(
        target_logits: Any,
        draft_logits: Any,
        draft_sampled: Any,
        cu_num_logits: Any,
        pos: Any,
        idx_mapping: Any,
        expanded_idx_mapping: Any,
        expanded_local_pos: Any,
        temperature: Any,
        seed: Any,
        num_speculative_steps: int,
        synthetic_conditional_rates: Any = None,
        **options: Any,
    ) -> Any:
        if RACING.get() is None or synthetic_conditional_rates is not None or options.get("contexts") is not None:
            given = (target_logits, draft_logits, draft_sampled, cu_num_logits, pos, idx_mapping, expanded_idx_mapping)
            more = (expanded_local_pos, temperature, seed, num_speculative_steps, synthetic_conditional_rates)
            return rejection_sample(*given, *more, **options)
        return verify_second(
            gumbel_sample,
            target_logits,
            draft_sampled,
            cu_num_logits,
            pos,
            expanded_idx_mapping,
            temperature,
            seed,
            num_speculative_steps,
            options.get("use_fp64", False),
        )

    return verify


# The first model runner


def _install_first() -> None:
    runner = find(FIRST_RUNNER)
    filters = find(FIRST_FILTERS)
    verifier = import_module(FIRST_VERIFIER)
    verified = first_verified(verifier.rejection_sample)
    spread = first_spread(verifier.expand_batch_to_tokens)
    runner._sample = first_sampling(runner._sample)
    filters.__init__ = first_drawn(filters.__init__, import_module(filters.__module__))
    verifier.rejection_sample = verified  # type: ignore[attr-defined]
    verifier.expand_batch_to_tokens = spread  # type: ignore[attr-defined]


def first_sampling(sample: Any) -> Any:
    """A pass of the first model runner, with the seeds and positions of its rows."""

    @functools.wraps(sample)
    def sample_by_race(self: Any, logits: Any, spec_decode_metadata: Any) -> Any:
        if not wanted(self.vllm_config):
            return sample(self, logits, spec_decode_metadata)
        token = RACING.set(pass_of(self, spec_decode_metadata))
        try:
            return sample(self, logits, spec_decode_metadata)
        finally:
            RACING.reset(token)

    return sample_by_race


def pass_of(runner: Any, layout: Any) -> RacedPass:
    """`layout` is vLLM's SpecDecodeMetadata, None where nothing was drafted. A token stands one position behind the one
    that its row has read."""
    names = runner.input_batch.req_ids
    sampling = [runner.requests[name].sampling_params for name in names]
    keys = torch.tensor([key_of_seed(s.seed or 0) for s in sampling], device=runner.device)
    if layout is None:
        ends = runner.query_start_loc.gpu[1 : len(names) + 1]
        return RacedPass(DrawnRows(keys, runner.positions[ends - 1] + 1))
    positions = runner.positions[layout.logits_indices] + 1
    counts = torch.tensor(layout.num_draft_tokens, device=runner.device)
    last = DrawnRows(keys, positions[layout.bonus_logits_indices])
    drafted = DrawnRows(keys.repeat_interleave(counts), positions[layout.target_logits_indices])
    return RacedPass(last, drafted, layout)


def first_drawn(init: Any, module: Any) -> Any:
    """The constructor of what applies top-k and top-p and draws, of which `forward` is chosen by the platform. Runs of
    vLLM that only measure memory draw as vLLM does."""

    @functools.wraps(init)
    def init_with_race(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        forward = self.forward

        def draw(logits: Any, generators: Any, k: Any, p: Any) -> Any:
            raced = RACING.get()
            if raced is None or raced.last is None:
                return forward(logits, generators, k, p)
            logits = module.apply_top_k_top_p(logits, k, p)
            returned = {"processed_logits": lambda x: x, "processed_logprobs": lambda x: x.log_softmax(-1)}
            made = returned.get(self.logprobs_mode)
            return raced.last.draw(logits), None if made is None else made(logits)

        self.forward = draw

    return init_with_race


def first_verified(rejection_sample: Any) -> Any:
    """What verifies in the first model runner."""

    @functools.wraps(rejection_sample)
    def verify(
        draft_token_ids: Any,
        num_draft_tokens: Any,
        max_spec_len: int,
        cu_num_draft_tokens: Any,
        draft_probs: Any,
        target_logits: Any,
        bonus_token_ids: Any,
        sampling_metadata: Any,
        synthetic_mode: bool = False,
        **options: Any,
    ) -> Any:
        raced = RACING.get()
        if raced is None or raced.drafted is None or synthetic_mode:
            given = (draft_token_ids, num_draft_tokens, max_spec_len, cu_num_draft_tokens, draft_probs, target_logits)
            return rejection_sample(*given, bonus_token_ids, sampling_metadata, synthetic_mode, **options)
        return verify_first(raced, target_logits, bonus_token_ids, sampling_metadata, draft_token_ids)

    return verify


def first_spread(expand_batch_to_tokens: Any) -> Any:
    @functools.wraps(expand_batch_to_tokens)
    def expand(x: Any, cu_num_tokens: Any, num_tokens: int, replace_from: float = 0, replace_to: float = 0) -> Any:
        if RACING.get() is None:
            return expand_batch_to_tokens(x, cu_num_tokens, num_tokens, replace_from, replace_to)
        return by_row(x, cu_num_tokens, replace_from, replace_to)

    return expand
