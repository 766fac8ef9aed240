"""Load an export with the speculators library, as its training does, and hold every tensor against what was written:

python load_speculators.py FOLDER    prints {class, equal, different, missing, window, layers} as JSON
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from speculators import SpeculatorModel


def main(folder: Path) -> None:
    model = SpeculatorModel.from_pretrained(str(folder))
    written, loaded = load_file(folder / "model.safetensors"), model.state_dict()
    equal = [n for n, t in written.items() if n in loaded and torch.equal(loaded[n].to(t.dtype), t)]
    model.load_verifier_weights()
    unknown = [n for n, t in model.state_dict().items() if t.is_floating_point() and bool(t.isnan().any())]
    type(model).verify_training_compatible(model)
    result = {
        "class": type(model).__name__,
        "equal": len(equal),
        "different": sorted(set(written) - set(equal)),
        "missing": unknown,
        "window": model.sliding_window,
        "layers": model.target_layer_ids,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
