"""Without TRL (`paceline[trl]`), its tests are left out, and the others still run."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("trl") else ["test_trl*.py"]
