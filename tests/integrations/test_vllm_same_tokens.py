"""The race for vLLM without vLLM: what stands in for its functions, by definition, and who gets it."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from paceline.errors import UserError
from paceline.integrations.vllm import plugin, same_tokens, seeds, settings, versions
from paceline.integrations.vllm.options import paceline_options
from paceline.integrations.vllm.race import (
    NO_TOKEN,
    RACING,
    DrawnRows,
    RacedPass,
    accept,
    by_row,
    key_of_seed,
    verify_first,
    verify_second,
)
from paceline.kernels.noise import gumbel, position_keys, request_key

VOCAB = 40


def by_definition(draws: list[list[int]], drafts: list[list[int]]) -> list[list[int]]:
    """Token by token: a draw is written, and the next one too if it was drafted."""
    written = []
    for drawn, drafted in zip(draws, drafts, strict=True):
        tokens = [drawn[0]]
        for i, draft in enumerate(drafted):
            if draft != drawn[i]:
                break
            tokens.append(drawn[i + 1])
        written.append(tokens)
    return written


@pytest.fixture(params=range(8))
def drawn(request) -> tuple[list[list[int]], list[list[int]]]:
    """Of seven requests with up to four draft tokens, most of them right."""
    generator = torch.Generator().manual_seed(request.param)
    draws, drafts = [], []
    for depth in torch.randint(0, 5, (7,), generator=generator).tolist():
        draws.append(torch.randint(0, VOCAB, (depth + 1,), generator=generator).tolist())
        right = (torch.rand(depth, generator=generator) < 0.7).tolist()
        drafts.append([token if ok else (token + 1) % VOCAB for token, ok in zip(draws[-1], right, strict=False)])
    return draws, drafts


def flat(lists: list[list[int]]) -> torch.Tensor:
    return torch.tensor([x for each in lists for x in each])


def test_draws_count_up_to_the_first_that_was_not_drafted(drawn):
    draws, drafts = drawn
    ends = torch.tensor([0, *[len(d) for d in draws]]).cumsum(0)
    read = flat([[99, *d] for d in drafts])
    tokens, counts = accept(flat(draws), read, ends, width=6)
    assert tokens.shape == (7, 6) and counts.dtype == torch.int32
    assert [t[:n] for t, n in zip(tokens.tolist(), counts.tolist(), strict=True)] == by_definition(draws, drafts)


def layout_of(drafts: list[list[int]]) -> SimpleNamespace:
    """vLLM's SpecDecodeMetadata."""
    counts = torch.tensor([len(d) for d in drafts])
    ends = (counts + 1).cumsum(0)
    rows = torch.arange(int(ends[-1]))
    last = ends - 1
    return SimpleNamespace(
        num_draft_tokens=counts.tolist(),
        max_spec_len=int(counts.max()),
        cu_num_sampled_tokens=ends.to(torch.int32),
        logits_indices=rows,
        bonus_logits_indices=last,
        target_logits_indices=rows[~torch.isin(rows, last)],
    )


def test_the_first_runner_is_told_what_the_race_of_each_row_gives(drawn):
    """Rows of greedy requests, and of others, with the noise of their seeds and positions."""
    _, drafts = drawn
    drafts[0] = [*drafts[0], 3][:4]  # at least one is verified
    layout = layout_of(drafts)
    keys = torch.tensor([request_key(seed, 0) for seed in range(7)])
    first = torch.arange(7) * 10 + 5
    rows = [(b, int(first[b]) + i) for b, d in enumerate(drafts) for i in range(len(d) + 1)]
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(5))
    temperature = torch.tensor([1.0, 0.0, 0.7, 1.0, 0.0, 1.0, 1.0])
    draws: list[list[int]] = [[] for _ in drafts]
    for row, (b, position) in enumerate(rows):
        noise = gumbel(position_keys(keys[b], torch.tensor(position)), VOCAB)
        draws[b].append(int((logits[row] + (noise if temperature[b] else 0)).argmax()))
    for b, d in enumerate(drafts):  # most of them right again
        drafts[b] = [draw if i != 2 else token for i, (draw, token) in enumerate(zip(draws[b], d, strict=False))]
    positions = torch.tensor([p for _, p in rows])
    counts = torch.tensor(layout.num_draft_tokens)
    raced = RacedPass(
        DrawnRows(keys, positions[layout.bonus_logits_indices]),
        DrawnRows(keys.repeat_interleave(counts), positions[layout.target_logits_indices]),
        layout,
    )
    sampling = SimpleNamespace(all_random=False, all_greedy=False, temperature=temperature)
    bonus = torch.tensor([[d[-1]] for d in draws], dtype=torch.int32)
    target = logits[layout.target_logits_indices]
    found = verify_first(raced, target, bonus, sampling, flat(drafts).to(torch.int32))
    assert found.dtype == torch.int32 and found.shape == (7, layout.max_spec_len + 1)
    assert [[t for t in row if t != NO_TOKEN] for row in found.tolist()] == by_definition(draws, drafts)


def test_a_pass_of_the_first_runner_may_verify_nothing():
    layout = layout_of([[], []])
    nothing = torch.empty(0, dtype=torch.int64)
    raced = RacedPass(None, DrawnRows(nothing, nothing), layout)
    sampling = SimpleNamespace(all_random=True, all_greedy=False)
    found = verify_first(raced, torch.empty(0, VOCAB), torch.tensor([[3], [4]]), sampling, nothing)
    assert found.tolist() == [[3], [4]]


def test_draws_of_the_first_runner_are_those_of_our_engine():
    """Request 0 with the same seed, at the same position."""
    logits = torch.randn(5, VOCAB)
    positions = torch.arange(5) + 11
    keys = torch.full((5,), key_of_seed(1234))
    noise = gumbel(position_keys(torch.full((5,), request_key(1234, 0)), positions), VOCAB)
    assert DrawnRows(keys, positions).draw(logits).tolist() == (logits + noise).argmax(-1).tolist()
    greedy = torch.tensor([True, False, True, False, True])
    expected = torch.where(greedy, logits.argmax(-1), (logits + noise).argmax(-1))
    assert DrawnRows(keys, positions).draw(logits, greedy).tolist() == expected.tolist()


def test_the_second_runner_draws_with_its_own_sampler(drawn):
    draws, drafts = drawn
    drawn_by = []

    def gumbel_sample(logits, states, temperature, seeds, positions, apply_temperature, use_fp64):
        drawn_by.append((states, temperature, seeds, positions, apply_temperature, use_fp64))
        return flat(draws)

    ends = torch.tensor([0, *[len(d) for d in draws]]).cumsum(0)
    read = flat([[99, *d] for d in drafts])
    states = torch.arange(len(read)) % 7
    temperature = torch.ones(7)
    seeds_of = torch.arange(7)
    positions = torch.arange(len(read))
    given = (states, temperature, seeds_of, positions)
    logits = torch.zeros(len(read), VOCAB)
    tokens, counts = verify_second(
        gumbel_sample, logits, read, ends, positions, states, temperature, seeds_of, 5, use_fp64=True
    )
    assert [t[:n] for t, n in zip(tokens.tolist(), counts.tolist(), strict=True)] == by_definition(draws, drafts)
    assert tokens.shape == (7, 6) and drawn_by[0][4:] == (False, True)
    assert all(x is y for x, y in zip(drawn_by[0], given, strict=False))


def test_values_by_row():
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    assert by_row(torch.tensor([0.5, 0.7, 0.0]), ends, 0, 1).tolist() == [0.5, 0.5, 1.0, 1.0, 1.0]
    assert by_row(torch.tensor([4, 5, 6], dtype=torch.int32), ends, 0, 0).dtype == torch.int32


def engine(paceline: object, seed: int = 0) -> SimpleNamespace:
    return SimpleNamespace(
        additional_config={"paceline": paceline} if paceline is not None else {},
        model_config=SimpleNamespace(seed=seed),
        use_v2_model_runner=True,
    )


def test_it_is_off_by_default():
    assert not same_tokens.wanted(engine(None)) and not same_tokens.wanted(engine({}))
    assert not same_tokens.wanted(engine({"same_tokens": False})) and same_tokens.wanted(engine({"same_tokens": True}))
    assert not same_tokens.wanted(SimpleNamespace(additional_config=None))
    options = paceline_options("drafter", same_tokens=True)
    assert same_tokens.wanted(SimpleNamespace(additional_config=options["additional_config"]))
    with pytest.raises(UserError, match="same_tokens"):
        settings.TunerSettings.of({"paceline": {"same_tokens": "perhaps"}})


def test_outside_of_a_race_vllm_verifies_by_itself():
    given = []

    def rejection_sample(*args, **kwargs):
        given.append((args, kwargs))
        return "theirs"

    second = same_tokens.second_verified(rejection_sample, None)
    arguments = tuple(range(11))
    assert second(*arguments, None, use_fp64=True) == "theirs" and given[-1] == ((*arguments, None), {"use_fp64": True})
    token = RACING.set(RacedPass())
    try:
        rates = torch.ones(3)
        assert second(*arguments, rates) == "theirs", "acceptance that is made up"
        assert second(*arguments, None, contexts=rates) == "theirs", "a watermark"
    finally:
        RACING.reset(token)
    first = same_tokens.first_verified(rejection_sample)
    assert first(*range(8), synthetic_conditional_rates=None) == "theirs"
    assert given[-1] == ((*range(8), False), {"synthetic_conditional_rates": None})
    spread = same_tokens.first_spread(lambda *args: args)
    assert spread(1, 2, 3) == (1, 2, 3, 0, 0) and spread(1, 2, 3, replace_from=4, replace_to=5) == (1, 2, 3, 4, 5)


class Core:
    def __init__(self, config: SimpleNamespace):
        self.vllm_config = config

    def preprocess_add_request(self, request: SimpleNamespace) -> SimpleNamespace:
        return request


def seeded(config: SimpleNamespace, name: str, given: str | None, seed: int | None = None, temperature: float = 1.0):
    core = seeds.with_seed(Core.preprocess_add_request, same_tokens.wanted)
    sampling = SimpleNamespace(seed=seed, temperature=temperature)
    request = SimpleNamespace(request_id=name, external_req_id=given, sampling_params=sampling)
    found = core(Core(config), request).sampling_params.seed
    assert sampling.seed == seed, "the caller's parameters stay as they are"
    return found


def test_requests_without_a_seed_get_one_from_the_engines_seed_and_their_id():
    raced = engine({"same_tokens": True}, seed=7)
    found = seeded(raced, "5-0a1b2c3d", "5")
    assert found == seeded(raced, "5-ffffffff", "5") == seeded(raced, "5", "5") == seeded(raced, "5", None)
    assert 0 <= found < 1 << 63
    others = [
        seeded(raced, "6-0a1b2c3d", "6"),
        seeded(raced, "0_5-0a1b2c3d", "5"),
        seeded(raced, "1_5-ffffffff", "5"),
        seeded(engine({"same_tokens": True}, seed=8), "5", "5"),
    ]
    assert len({found, *others}) == 5, "another request, other samples of one prompt, another engine"
    assert seeded(raced, "0_5-0a1b2c3d", "5") == seeded(raced, "0_5-12345678", "5")
    assert seeded(raced, "5", "5", seed=3) == 3
    assert seeded(raced, "5", "5", temperature=0.0) is None
    assert seeded(engine({}), "5", "5") is None


class Worker:
    def __init__(self, vllm_config: SimpleNamespace, rank: int):
        self.rank = rank


@pytest.mark.parametrize(
    ("version", "second", "why"),
    [("0.30.1", True, "was not tested in the second"), ("0.26.0", False, "was not tested in the first"),
     ("0.26.0", True, "has moved")],
)  # fmt: skip
def test_a_version_that_was_not_tested_samples_as_vllm_does_and_says_so(version, second, why, monkeypatch, caplog):
    monkeypatch.setattr(same_tokens, "installed_version", lambda: version)
    monkeypatch.setattr(same_tokens, "RUNNER", "paceline.core:Runner")
    same_tokens._install.cache_clear()
    init = same_tokens.racing_worker(Worker.__init__)
    config = engine({"same_tokens": True})
    config.use_v2_model_runner = second
    with caplog.at_level(logging.WARNING, "vllm.paceline"):
        worker = SimpleNamespace()
        init(worker, engine({}), 1)
        assert worker.rank == 1 and not caplog.records
        init(worker, vllm_config=config, rank=2)
    assert worker.rank == 2
    assert [record.getMessage() for record in caplog.records if why in record.getMessage()]
    same_tokens._install.cache_clear()


def test_the_table_says_where_it_was_tested():
    assert versions.VERSIONS[0, 26].raced == ("second",) and versions.VERSIONS[0, 32].raced == ("first",)
    hooked = {(where, method) for where, method, _ in plugin.HOOKS}
    assert {("vllm.v1.worker.worker_base:WorkerBase", "__init__"), (plugin.ENGINE, "preprocess_add_request")} <= hooked
