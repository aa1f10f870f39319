"""Workers over nodes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddnn.slurm.cluster import ClusterConfig, Placement, place
from ddnn.util.errors import UserError

COUNT = st.none() | st.integers(1, 12)


@pytest.mark.parametrize(
    ("settings", "workers", "recipe_workers", "expected"),
    [
        ({}, None, 1, (1, 1, 0)),
        ({}, None, 6, (1, 6, 0)),
        ({"nodes": 2}, None, 6, (2, 3, 0)),
        ({"nodes": 2, "workers_per_node": 2}, None, 6, (2, 2, 0)),  # the command line or the cluster says all
        ({"workers_per_node": 2}, None, 6, (3, 2, 0)),
        ({"workers_per_node": 8}, 2, 6, (1, 2, 0)),
        ({"gpus_per_node": 4}, None, 1, (1, 4, 4)),
        ({"gpus_per_node": 4, "nodes": 2}, None, 1, (2, 4, 4)),
        ({"gpus_per_node": 4}, 2, 1, (1, 2, 2)),  # asks for no more GPUs than it uses
        ({"gpus_per_node": 4, "nodes": 2}, 2, 1, (2, 1, 1)),
        ({"gpus_per_node": 0, "workers_per_node": 4}, None, 1, (1, 4, 0)),
    ],
)
def test_places(
    settings: dict[str, int], workers: int | None, recipe_workers: int, expected: tuple[int, int, int]
) -> None:
    assert place(ClusterConfig(**settings), workers, recipe_workers, False) == Placement(*expected)


@pytest.mark.parametrize(
    ("settings", "workers", "said"),
    [
        ({}, 0, "0 workers found"),
        ({"nodes": 2}, -2, "-2 workers found"),
        ({"nodes": 2}, 3, "3 workers cannot be spread evenly over 2 nodes"),
        ({"workers_per_node": 4}, 6, "6 workers cannot be spread evenly over nodes of 4"),
        ({"nodes": 2, "workers_per_node": 4}, 6, "are 3 on each, but 4 are asked for"),
        ({"gpus_per_node": 2, "workers_per_node": 4}, None, "4 workers on each node, but 2 GPUs"),
    ],
)
def test_refuses(settings: dict[str, int], workers: int | None, said: str) -> None:
    with pytest.raises(UserError, match=said):
        place(ClusterConfig(**settings), workers, 1, False)


def test_shared_devices() -> None:
    assert place(ClusterConfig(gpus_per_node=2, workers_per_node=4), None, 1, True) == Placement(1, 4, 2)


@given(COUNT, COUNT, COUNT, COUNT, st.integers(1, 12))
def test_never_other_than_asked(
    nodes: int | None, each: int | None, gpus: int | None, workers: int | None, recipe_workers: int
) -> None:
    cluster = ClusterConfig(nodes=nodes, workers_per_node=each, gpus_per_node=gpus)
    try:
        found = place(cluster, workers, recipe_workers, False)
    except UserError:
        return
    assert workers in (None, found.workers)
    assert nodes in (None, found.nodes)
    assert found.gpus_per_node == (found.workers_per_node if gpus else 0) <= (gpus or 0)
    assert each is None or found.workers_per_node <= each
