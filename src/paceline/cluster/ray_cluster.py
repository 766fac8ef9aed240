"""Finding a Ray cluster, and what it has."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from paceline.cluster.addresses import why_unreachable
from paceline.cluster.deadline import within
from paceline.errors import UserError

if TYPE_CHECKING:
    from paceline.config import Config

INIT_S = 90.0  # seconds in which a Ray cluster can be joined, or started on this machine
HEAD_PROBE_S = 10.0  # seconds in which its head accepts a connection


def import_ray() -> Any:
    try:
        import ray
    except ImportError as err:
        raise UserError("cluster.backend=ray needs Ray: pip install 'paceline[ray]'") from err
    return ray


def connect(ray: Any, address: str | None) -> None:
    if address:
        _check_reachable(address)
    where = f"at {address}" if address else "on this machine"

    def init() -> None:
        ray.init(
            address=address,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=True,
            logging_level=logging.ERROR,
        )

    try:
        if address in (None, "local"):
            init()  # processes that Ray starts end with the thread that did so; it has deadlines for those itself
        else:
            within(INIT_S, init)
    except (ConnectionError, RuntimeError, ValueError, OSError, ray.exceptions.RayError) as err:
        if "AuthToken" in str(err) or "AuthenticationError" in str(err):
            raise UserError(
                f"the Ray cluster {where} asks for a token that this machine does not show: set RAY_AUTH_MODE=token, "
                "with the cluster's token in ~/.ray/auth_token or in the file that RAY_AUTH_TOKEN_PATH names"
            ) from err
        raise UserError(f"no Ray cluster can be reached {where} ({first_line(err)}); see cluster.address") from err


def _check_reachable(address: str) -> None:
    """Ray itself tries for minutes before it gives up."""
    host, port = parse_address(address.removeprefix("ray://"))
    if not port:  # "auto", or a name that only Ray understands
        return
    why = why_unreachable((host, port), HEAD_PROBE_S)
    if why:
        raise UserError(f"no Ray cluster can be reached at {address} ({why}); see cluster.address")


def parse_address(address: str) -> tuple[str, int]:
    """Host and port; port 0 if there is none."""
    host, _, port = address.rpartition(":")
    return (host.strip("[]"), int(port)) if port.isdigit() else (address, 0)


def choose_ray_device(config: Config) -> str:
    """cpu or cuda, the same for all workers; says so if the cluster has too few GPUs."""
    c = config.cluster
    wanted = config.model.device
    gpus = int(import_ray().cluster_resources().get("GPU", 0))
    if wanted == "cpu" or (wanted == "auto" and not gpus):
        return "cpu"
    if c.workers > gpus * c.workers_per_gpu:
        raise UserError(
            f"cluster.workers={c.workers}, but the Ray cluster has {gpus} GPU{'s' if gpus != 1 else ''} for "
            f"{c.workers_per_gpu} each: lower it, set cluster.workers_per_gpu, or model.device=cpu"
        )
    return "cuda"


def first_line(err: Exception) -> str:
    return str(err).strip().partition("\n")[0]
