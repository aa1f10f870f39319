"""How many workers, on how many nodes: from the command line, the cluster's settings and the recipe."""

from __future__ import annotations

from dataclasses import dataclass

from ddnn.slurm.cluster import ClusterConfig
from ddnn.util.errors import UserError


@dataclass(frozen=True)
class Placement:
    """The same number of workers on each node. `gpus_per_node`: GPUs to ask for, 0 where workers compute on cores."""

    nodes: int
    workers_per_node: int
    gpus_per_node: int

    @property
    def workers(self) -> int:
        """All of them."""
        return self.nodes * self.workers_per_node

    def __str__(self) -> str:
        location = f"{self.gpus_per_node} GPU{_s(self.gpus_per_node)} each" if self.gpus_per_node else "CPU cores"
        return f"{self.workers} worker{_s(self.workers)} on {self.nodes} node{_s(self.nodes)}, {location}"


def place(cluster: ClusterConfig, workers: int | None, recipe_workers: int, oversubscribe_gpus: bool) -> Placement:
    """Spreads the workers evenly over nodes.

    Args:
        cluster: the settings, options of the command line merged in.
        workers: how many were asked for on the command line, by --workers; None where it does not say.
        recipe_workers: `parallel.workers`, which counts where nothing else says the number.
        oversubscribe_gpus: whether there may be more workers than GPUs.

    Raises:
        UserError: they cannot be spread evenly, the numbers contradict each other, or there are too few GPUs.
    """
    if workers is not None and workers < 1:
        raise UserError(f"{workers} workers found, expected a whole number >= 1", location="--workers")
    nodes, gpus = cluster.nodes, cluster.gpus_per_node or 0
    most = cluster.workers_per_node or gpus or None
    if workers is None and (nodes is None or most is None) and recipe_workers > 1:
        workers = recipe_workers
    if workers is None:
        nodes, each = nodes or 1, most or 1
    elif nodes is not None:
        each = _divided(workers, nodes, f"{nodes} nodes", f"take a multiple of {nodes}, or other --nodes")
        if cluster.workers_per_node not in (None, each):
            raise UserError(
                f"{workers} workers on {nodes} nodes are {each} on each, but {cluster.workers_per_node} are asked for",
                location="--workers-per-node",
                hint="leave one of --workers, --nodes, --workers-per-node out",
            )
    else:
        each = min(workers, most or workers)
        nodes = _divided(workers, each, f"nodes of {each}", f"take a multiple of {each}, or say --nodes")
    if gpus and each > gpus and not oversubscribe_gpus:
        raise UserError(
            f"{each} workers on each node, but {gpus} GPU{_s(gpus)}",
            location="--gpus-per-node",
            hint="take more nodes or fewer workers, or set parallel.oversubscribe_gpus: true in the recipe",
        )
    return Placement(nodes, each, min(gpus, each))


def _divided(workers: int, by: int, over: str, hint: str) -> int:
    if workers % by:
        raise UserError(f"{workers} workers cannot be spread evenly over {over}", location="--workers", hint=hint)
    return workers // by


def _s(count: int) -> str:
    return "" if count == 1 else "s"
