"""The race in vLLM's second model runner, whose kernels run on a CPU in Triton's interpreter: what its verification
gives with Paceline's in its place. Runs in an environment of its own (`make test-vllm`), with the package on its path:

python race_second.py OUT
    {drafts, by request; alone, what passes without draft tokens draw at each position; verified, tokens by request}
"""

from __future__ import annotations

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl
import vllm.triton_utils as triton_utils
from triton.language.extra import libdevice

triton_utils.HAS_TRITON = True  # vLLM takes none where there is no GPU
triton_utils.triton = triton
triton_utils.tl = tl
triton_utils.tldevice = libdevice

from vllm.v1.worker.gpu.spec_decode import rejection_sampler  # noqa: E402

from paceline.integrations.vllm import same_tokens  # noqa: E402
from paceline.integrations.vllm.race import RACING, RacedPass  # noqa: E402

VOCAB, DEPTH, STATES = 300, 3, 8
PLACES = [5, 0, 3, 6]
"""Of four requests, among those that the engine knows."""


def main(out: str) -> None:
    generator = torch.Generator().manual_seed(0)
    sample = same_tokens.second_sampler()
    temperature = torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0])
    seeds = torch.randint(-(2**62), 2**62, (STATES,), generator=generator)
    depths = [3, 2, 3, 0]
    first = [17, 40, 8, 2]
    rows = [(b, at) for b, depth in enumerate(depths) for at in range(depth + 1)]
    logits = torch.randn(len(rows), VOCAB, generator=generator) * 2
    states = torch.tensor([PLACES[b] for b, _ in rows], dtype=torch.int32)
    positions = torch.tensor([first[b] + at for b, at in rows])
    alone = [
        int(sample(logits[[r]], states[[r]], temperature, seeds, positions[[r]], apply_temperature=False))
        for r in range(len(rows))
    ]
    read = torch.tensor([99 if at == 0 else alone[r - 1] for r, (_, at) in enumerate(rows)], dtype=torch.int32)
    read[2] = (read[2] + 1) % VOCAB  # the second draft token of the first request is wrong
    ends = torch.tensor([0, *[d + 1 for d in depths]], dtype=torch.int32).cumsum(0).to(torch.int32)
    same_tokens._install_second()
    token = RACING.set(RacedPass())
    try:
        sampled, counts = rejection_sampler.rejection_sample(
            logits,
            None,
            read,
            ends,
            positions,
            torch.tensor(PLACES, dtype=torch.int32),
            states,
            torch.tensor([at for _, at in rows], dtype=torch.int32),
            temperature,
            seeds,
            DEPTH,
            None,
            use_fp64=False,
            use_block_verification=False,
        )
    finally:
        RACING.reset(token)
    assert sampled.shape == (4, DEPTH + 1) and counts.dtype == torch.int32
    result = {
        "alone": [alone[ends[b] : ends[b + 1]] for b in range(4)],
        "verified": [row[:n] for row, n in zip(sampled.tolist(), counts.tolist(), strict=True)],
        "best": logits[states == 3].argmax(-1).tolist(),
    }
    with open(out, "w") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main(sys.argv[1])
