"""Reduce strategies on real MPI processes against their mixing matrices and float64 twins."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distributed.mpi_checks import LARGE, PARAMETERS, PLAIN, ROUNDS, SHAPES, parameters, strategy, weight
from distributed.mpi_worlds import launch
from distributed.threads import run_workers
from numpy.typing import NDArray
from twins import quantized

from ddnn.averaging.one_bit import cut_into_stripes
from ddnn.averaging.strategies import STRATEGIES, _Gossip, make_strategy
from ddnn.averaging.strategy import AveragingOptions, AveragingStrategy, CommDtype, Traffic, gather_weights
from ddnn.distributed.communicator import CommStats, Communicator, SingleProcess
from ddnn.recipe.schema import AveragingConfig, Recipe
from ddnn.report.scaling import CommScheme, Constants, Job, comm_seconds, epoch_seconds
from ddnn.training.options import estimate_memory

WORLDS = [1, 2, 3, 4, 5, 6, 7, 8]
GOSSIP = ["butterfly", "ring", "hopping-ring"]
Matrix = NDArray[np.float64]


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, Any]]:
    """n -> what n MPI processes computed."""
    out = tmp_path_factory.mktemp("mpi")
    process = launch(8, "mpi_checks.py", out)
    _, errors = process.communicate(timeout=600)
    assert (process.returncode, errors) == (0, "")
    return lambda n: json.loads((out / f"{n}.json").read_text())


def mixing_matrix(name: str, n: int, index: int, weights: list[float] | None = None) -> Matrix:
    """M, (n, n): averaging number `index` of strategy `name` makes theta_r <- sum_s M[r, s] theta_s.

    Args:
        weights: frames behind each worker's parameters, for all-reduce; equal where not given.
    """
    strategy = STRATEGIES[name]
    if n == 1 or not issubclass(strategy, _Gossip):
        given = np.ones(n) if weights is None else np.asarray(weights, dtype=np.float64)
        return np.tile(given / given.sum(), (n, 1))
    matrix: Matrix = np.eye(n) / 2
    for rank in range(n):
        matrix[rank, strategy.peers(rank, n, index)[1]] += 0.5
    return matrix


def initial(n: int) -> Matrix:
    return np.stack([parameters(rank).double().numpy() for rank in range(n)])


def disagreement(theta: Matrix) -> float:
    return float(np.linalg.norm(theta - theta.mean(axis=0)))


def weighted_mean(theta: Matrix) -> Matrix:
    return np.average(theta, axis=0, weights=[weight(rank) for rank in range(len(theta))])


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("n", [*WORLDS, 16, 17, 31])
def test_mixing_matrices_keep_the_mean(name: str, n: int) -> None:
    for number in range(3 * n):
        matrix = mixing_matrix(name, n, number)
        assert (matrix >= 0).all()
        np.testing.assert_allclose(matrix.sum(axis=0), 1, atol=1e-15)
        np.testing.assert_allclose(matrix.sum(axis=1), 1, atol=1e-15)


@pytest.mark.parametrize("number", range(7))
def test_mixing_matrices_are_those_of_the_paper(number: int) -> None:
    """By permutation matrices; the butterfly for 2^q workers."""
    for n in (2, 4, 8):
        swap = np.eye(n)[[rank ^ 2 ** (number % int(math.log2(n))) for rank in range(n)]]
        np.testing.assert_array_equal(mixing_matrix("butterfly", n, number), (np.eye(n) + swap) / 2)
    for n in (2, 3, 5, 8):
        once = np.roll(np.eye(n), 1, axis=0)  # row r has its 1 at column r - 1
        np.testing.assert_array_equal(mixing_matrix("ring", n, number), (np.eye(n) + once) / 2)
        hops = np.linalg.matrix_power(once, [*range(1, n)][number % (n - 1)])
        np.testing.assert_array_equal(mixing_matrix("hopping-ring", n, number), (np.eye(n) + hops) / 2)
    np.testing.assert_allclose(mixing_matrix("all-reduce", 3, number, [1, 2, 5]), [[1 / 8, 2 / 8, 5 / 8]] * 3)


@pytest.mark.parametrize("n", [*WORLDS, 12, 16, 33])
def test_butterfly_of_any_number_of_workers_is_nearly_the_mean_after_log2_rounds(n: int) -> None:
    """Every model counts floor or ceil of 2^q / n times, out of 2^q; 2^q workers: exactly once."""
    rounds = (n - 1).bit_length()
    for start in range(0, 3 * rounds, max(rounds, 1)):
        matrices = [mixing_matrix("butterfly", n, start + number) for number in range(rounds)]
        counts = 2**rounds * reduce(lambda a, b: b @ a, matrices, np.eye(n))
        assert set(counts.ravel()) <= {2**rounds // n, -(-(2**rounds) // n)}


@pytest.mark.parametrize("n", WORLDS)
def test_all_reduce_is_the_weighted_mean(results: Callable[[int], dict[str, Any]], n: int) -> None:
    found = results(n)["all-reduce"]
    theta = np.array(found["weighted"])
    np.testing.assert_allclose(theta, np.tile(weighted_mean(initial(n)), (n, 1)), atol=1e-6, rtol=0)
    assert (theta == theta[0]).all()
    assert found["large error"] < 1e-6
    assert len(found["large digests"]) == n
    assert len(set(found["large digests"])) == 1


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("n", WORLDS)
def test_every_round_does_what_the_mixing_matrix_says(
    results: Callable[[int], dict[str, Any]], n: int, name: str
) -> None:
    measured = np.array(results(n)["gossip"][name])
    assert measured.shape == (ROUNDS + 1, n, PARAMETERS)
    theta = initial(n)
    np.testing.assert_array_equal(measured[0], theta)
    weights = [weight(rank) for rank in range(n)]
    mean = weighted_mean(theta) if name == "all-reduce" else theta.mean(axis=0)
    for number in range(ROUNDS):
        before, theta = theta, mixing_matrix(name, n, number, weights) @ theta
        np.testing.assert_allclose(measured[number + 1], theta, atol=1e-6, rtol=0)
        np.testing.assert_allclose(np.average(measured[number + 1], axis=0), mean, atol=1e-6, rtol=0)
        # The rate: compared by itself, since 1e-6 absolute says nothing once the workers are close.
        assert disagreement(theta) <= disagreement(before) + 1e-12
        assert disagreement(measured[number + 1]) == pytest.approx(disagreement(theta), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_butterfly_is_exact_after_log2_rounds(results: Callable[[int], dict[str, Any]], n: int) -> None:
    measured, rounds = np.array(results(n)["gossip"]["butterfly"]), int(math.log2(n))
    assert disagreement(measured[rounds - 1]) > 0.1
    assert (measured[rounds] == measured[rounds][0]).all(), "the same bits on every worker"
    np.testing.assert_allclose(measured[rounds][0], initial(n).mean(axis=0), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", GOSSIP)
@pytest.mark.parametrize("n", WORLDS)
def test_gossip_in_16_bits_keeps_the_mean(results: Callable[[int], dict[str, Any]], n: int, name: str) -> None:
    narrow, wide = np.array(results(n)["gossip 16-bit"][name]), np.array(results(n)["gossip"][name])
    start = initial(n)
    for number in range(ROUNDS + 1):
        np.testing.assert_allclose(narrow[number].mean(axis=0), start.mean(axis=0), atol=1e-6, rtol=0)
    # Half of two roundings of 2^-8 in each round, which mixing does not enlarge.
    np.testing.assert_allclose(narrow[1], wide[1], atol=2**-8 * np.abs(start).max(), rtol=0)
    np.testing.assert_allclose(narrow[-1], wide[-1], atol=ROUNDS * 2**-8 * np.abs(start).max(), rtol=0)
    assert n == 1 or (narrow != wide).any(), "it did travel in 16 bits"


@pytest.mark.parametrize("n", WORLDS)
@pytest.mark.parametrize("nesterov", [False, True])
def test_block_momentum_equals_its_float64_twin(
    results: Callable[[int], dict[str, Any]], n: int, nesterov: bool
) -> None:
    found, eta = results(n)["bmuf"][str(nesterov)], 1 - 1 / n
    assert found["momentum"] == eta
    model = parameters(99).double().numpy()
    start, change = model.copy(), np.zeros(PARAMETERS)
    for block in range(5):
        local = np.stack([start + 0.1 * parameters(rank, block + 1).double().numpy() for rank in range(n)])
        change = eta * change + (weighted_mean(local) - start)
        model = model + change
        start = model + eta * change if nesterov else model
        given = np.array(found["starts"][block])
        np.testing.assert_allclose(given, np.tile(start, (n, 1)), atol=1e-6, rtol=0)
        assert (given == given[0]).all()
        np.testing.assert_allclose(found["models"][block], model, atol=1e-6, rtol=0)


@pytest.mark.parametrize("n", WORLDS)
def test_elastic_averaging_equals_its_float64_twin(results: Callable[[int], dict[str, Any]], n: int) -> None:
    found, beta = results(n)["elastic"], 0.7
    center = parameters(99).double().numpy()
    local = np.tile(center, (n, 1))
    for block in range(5):
        local = local + [0.1 * parameters(rank, block + 1).double().numpy() for rank in range(n)]
        counted = slice(0, n - 1) if block == 2 and n > 1 else slice(0, n)
        differences = local - center
        mean = differences[counted].mean(axis=0)
        local = local - beta / n * differences
        center = center + beta * mean
        local[counted.stop :] = center
        np.testing.assert_allclose(found["starts"][block], local, atol=1e-6, rtol=0)
        centers = np.array(found["centers"][block])
        np.testing.assert_allclose(centers[0], center, atol=1e-6, rtol=0)
        assert (centers == centers[0]).all()
        expected = np.linalg.norm(differences - mean, axis=1)[counted]
        np.testing.assert_allclose(found["distances"][block][counted], expected, rtol=1e-4, atol=1e-5)
    assert found["end"] == found["centers"][-1]


@pytest.mark.parametrize("n", WORLDS)
def test_one_bit_averaging_equals_its_float64_twin(results: Callable[[int], dict[str, Any]], n: int) -> None:
    found = results(n)["1-bit"]["models"]
    model, shares = parameters(99).double(), [weight(rank) for rank in range(n)]
    residuals, residual_of_sum = [torch.zeros_like(model)] * n, torch.zeros_like(model)
    for block in range(6):
        counted = shares[: n - 1] if block == 2 and n > 1 else shares
        changes = [0.1 * parameters(rank, block + 1).double() for rank in range(n)]
        weighted = [share / sum(counted) * change for share, change in zip(counted, changes, strict=False)]
        sent = residuals = [a + b for a, b in zip(residuals, [*weighted, torch.zeros_like(model)], strict=False)]
        if block < 5:
            sent = [quantized(one, SHAPES) for one in residuals]
            residuals = [one - told for one, told in zip(residuals, sent, strict=True)]
        total = residual_of_sum + sum(sent)
        applied = quantized(total, SHAPES) if block < 5 else total
        residual_of_sum, model = total - applied, model + applied
        np.testing.assert_allclose(found[block][0], model, atol=1e-6, rtol=0)
        assert found[block] == [found[block][0]] * n, "the same bits on every worker"


@pytest.mark.parametrize("n", WORLDS)
def test_16_bit_mean_is_within_its_rounding(results: Callable[[int], dict[str, Any]], n: int) -> None:
    found = results(n)["16-bit"]
    one = np.array(found["one mean"])
    assert (one == one[0]).all()
    truth, scale = weighted_mean(initial(n)), weighted_mean(np.abs(initial(n)))
    np.testing.assert_array_less(np.abs(one[0] - truth), 2**-7 * scale + 1e-12)
    # Six averagings of parameters: only changes of 1e-3 are rounded, and the workers hold the same bits.
    narrow, wide = np.array(found["bfloat16"]), np.array(found["float32"])
    assert (narrow == narrow[0]).all()
    np.testing.assert_allclose(narrow, wide, atol=6 * 2**-7 * 1e-3 * 4, rtol=0)
    assert n == 1 or (narrow != wide).any(), "it did travel in 16 bits"
    blocks = results(n)
    for wide_start, narrow_start in zip(
        blocks["bmuf"]["False"]["starts"], blocks["bmuf 16-bit"]["starts"], strict=True
    ):
        # 0.1 * |change| <= 0.4, rounded by 2^-8 twice in each of 5 blocks, each counted n times at most.
        np.testing.assert_allclose(narrow_start, wide_start, atol=5 * n * 0.4 * 2**-7, rtol=0)


@pytest.mark.parametrize("n", WORLDS[1:])
def test_a_worker_gone_nan_is_excluded_and_gets_a_model_again(results: Callable[[int], dict[str, Any]], n: int) -> None:
    found, healthy = results(n)["excluded"], initial(n)[1:]
    np.testing.assert_allclose(found["all-reduce"], np.tile(healthy.mean(axis=0), (n, 1)), atol=1e-6, rtol=0)
    np.testing.assert_allclose(found["mean"], np.tile(healthy.mean(axis=0), (n, 1)), atol=1e-6, rtol=0)
    assert np.abs(np.array(found["16-bit mean"]) - healthy.mean(axis=0)).max() < 2**-7 * np.abs(healthy).max()
    for name in GOSSIP:
        theta, matrix = np.array(found[name]), mixing_matrix(name, n, 0)
        for rank in range(n):
            (source,) = [other for other in range(n) if other != rank and matrix[rank, other]]
            expected = healthy[source - 1] if rank == 0 else healthy[rank - 1]
            if rank and source:
                expected = (healthy[rank - 1] + healthy[source - 1]) / 2
            np.testing.assert_allclose(theta[rank], expected, atol=1e-6, rtol=0)
    assert all("no worker has a finite model" in text for text in found["nobody left"])


@pytest.mark.parametrize("n", WORLDS)
def test_the_communicator(results: Callable[[int], dict[str, Any]], n: int) -> None:
    found = results(n)["communicator"]
    for dtype in ("torch.float32", "torch.float64", "torch.int64"):
        assert found["sums"][dtype] == [n * (n - 1) // 2, n]
    assert found["received"] == [10 * ((rank - 1) % n) for rank in range(n)]
    assert found["buffer kept"]
    assert found["swapped"] == [[rank + 100 * other for other in range(n)] for rank in range(n)]
    assert found["told"] == [[n - 1.0]] * n
    assert found["least"] == 1000 - (n - 1)
    assert found["gathered"] == [{"rank": rank, "text": "ü" * rank, "none": None} for rank in range(n)]
    assert found["local"] == [[rank, n] for rank in range(n)]
    assert len(found["refused"]) == 3
    assert "not torch.bfloat16" in found["refused"][0]
    assert "strides (4,)" in found["refused"][1]


def test_one_worker_needs_no_mpi() -> None:
    comm = SingleProcess()
    for name in PLAIN:
        theta = parameters(0)
        strategy(comm, name).average(theta, 5, 3.0)
        assert (theta == parameters(0)).all()
    assert comm.all_gather_object({"a": [1]}) == [{"a": [1]}]
    assert comm.all_reduce_min(4) == 4
    with pytest.raises(ValueError, match="not nan"):
        strategy(comm, "all-reduce").average(parameters(0), 0, float("nan"))


@pytest.mark.parametrize("n", WORLDS)
def test_traffic_counts_each_buffer_once(results: Callable[[int], dict[str, Any]], n: int) -> None:
    sent = results(n)["traffic"]
    chunk = 2 * -(-LARGE // n)
    expected = {name: 4 * LARGE + 8 for name in PLAIN}
    expected |= {"butterfly 16-bit": 2 * LARGE + 8, "all-reduce 16-bit": n * chunk + 8}
    stripes = cut_into_stripes([(300, 1000), (1,)], n)
    expected["1-bit"] = n * max(stripe.num_bytes for stripe in stripes) + 8
    assert expected["1-bit"] < 4 * LARGE / 29
    for name, size in expected.items():
        assert sent[name] == [[size, True, True] if n > 1 else [0, False, False]] * n, name


def test_traffic_of_a_span_is_a_difference() -> None:
    assert CommStats(9, 4.0, 2.0) - CommStats(3, 1.0, 0.5) == CommStats(6, 3.0, 1.5)


@pytest.mark.parametrize("n", WORLDS)
def test_a_thread_beside_gives_the_same_bits(results: Callable[[int], dict[str, Any]], n: int) -> None:
    found = results(n)["beside"]
    assert found["thread"] == found["here"]
    assert len(found["here"]) == 11


@pytest.mark.parametrize("n", WORLDS[1:])
def test_a_process_group_gives_what_mpi_gives(results: Callable[[int], dict[str, Any]], n: int) -> None:
    """Messages to one other the same bits; sums may be added in another order."""
    found = results(n)["beside"]
    assert found["told"] == [[n - 1, 7]] * n
    for name, theta in found["here"].items():
        np.testing.assert_allclose(found["group"][name], theta, atol=1e-6, rtol=0, err_msg=name)
        if name.startswith(tuple(GOSSIP)):
            assert found["group"][name] == theta, name
        elif name != "elastic":  # whose workers keep models of their own
            assert found["group"][name] == [found["group"][name][0]] * n, name


def test_importing_the_package_imports_no_mpi(tmp_path: Path) -> None:
    (tmp_path / "mpi4py.py").write_text("raise ImportError('no MPI on this machine')")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from ddnn.distributed import failures\n"
        "from ddnn.averaging import strategies\n"
        "from ddnn.distributed.mpi import init_communicator\n"
        "exchange = init_communicator({})\n"
        "with failures.abort_all_on_error(exchange): exchange.barrier()\n"
        "print(exchange.world_size, 'mpi4py' in sys.modules)"
    )
    root = Path(__file__).parents[2]
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, cwd=root)
    assert run.stdout == "1 False\n", run.stderr


class Halfway(AveragingStrategy):
    """A toy: rank 0 sends its parameters to all, and every worker moves halfway to them."""

    def average(self, vector: torch.Tensor, index: int, weight: float) -> None:
        first = vector.clone()
        self.comm.broadcast(first)
        vector.add_(first).mul_(0.5)

    @classmethod
    def traffic(cls, world_size: int) -> Traffic:
        return Traffic((world_size - 1).bit_length(), 1.0)

    @classmethod
    def copies(cls, comm_dtype: CommDtype, world_size: int) -> int:
        return 1


def test_a_new_strategy_is_a_class_and_a_line_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STRATEGIES, "halfway", Halfway)
    theta = parameters(3)
    made = make_strategy(AveragingOptions(strategy="halfway"), SingleProcess())
    made.start(theta)
    made.average(theta, 0, 1.0)
    np.testing.assert_array_equal(theta, parameters(3))
    assert made.distance_to_mean(2.0) == 2.0
    assert made.state_dict() == {}

    job = Job(parameters=1000, operations=6000.0, minibatch=100, averaging_period=10, frames=1e6)
    constants = Constants(job, 0.1, 0.0, 0.0, 0.0, 0.0, latency=1e-3, byte_seconds=1e-6, final_mean=False)
    assert comm_seconds(constants, CommScheme("halfway"), 5) == pytest.approx(3 * 1e-3 + 4000 * 1e-6)
    assert epoch_seconds(constants, CommScheme("halfway"), 5) == pytest.approx(200 * (10 * 0.1 + 0.007))
    parallel = AveragingConfig.model_construct(strategy="halfway")
    recipe = Recipe.model_construct(precision="float32")
    plain = estimate_memory(recipe, 6, 5, 4).cpu
    found = estimate_memory(recipe.model_copy(update={"parallel": parallel}), 6, 5, 4).cpu
    assert found["averaging"] - plain["averaging"] == plain["files"] // 3, "one more copy of the parameters"


def test_after_the_mean_of_an_epoch_parameters_are_sent_as_float32_once() -> None:
    """The workers have trained far from the old reference: differences to it would be rounded too coarsely."""
    start = torch.randn(40, generator=torch.Generator().manual_seed(1))

    def work(comm: Communicator) -> list[tuple[torch.Tensor, int]]:
        made = make_strategy(AveragingOptions(comm_dtype="bfloat16"), comm)
        made.start(start)
        found = []
        for number, last in enumerate((False, True, False, False)):
            theta, before = start + 10 * number + comm.rank / 3, comm.stats.bytes_sent
            if last:
                made.end_epoch(theta, number, 1.0, 16)
            else:
                made.average(theta, number, 1.0)
            found.append((theta, comm.stats.bytes_sent - before))
        return found

    for found in run_workers(3, work):
        for number, (theta, _) in enumerate(found[:3]):
            torch.testing.assert_close(theta.double(), start.double() + 10 * number + 1 / 3, rtol=0, atol=1e-5)
        assert [size for _, size in found[:3]] == [4 * 40 + 8] * 3, "vector and weight"
        assert found[3][1] == 2 * 2 * 14 + 8 + 2 * 14, "a chunk to each other, the weight, and a chunk of the mean"


@pytest.mark.parametrize("name", GOSSIP)
def test_the_consensus_distance_of_gossip_is_the_distance_to_the_mean(name: str) -> None:
    """Of models that are as far from each other: (1, 0, 0), (0, 1, 0) and (0, 0, 1) are sqrt(2/3) from their mean."""

    def work(comm: Communicator) -> float:
        theta = torch.eye(3)[comm.rank].clone()
        before, made = theta.clone(), make_strategy(AveragingOptions(strategy=name), comm)
        made.average(theta, 0, 1.0)
        return made.distance_to_mean(float((theta - before).norm()))

    assert run_workers(3, work) == pytest.approx([math.sqrt(2 / 3)] * 3)


def test_gathered_weights_outlive_the_next_collective() -> None:
    """`all_gather` gives the same memory for the next tensor of as many elements."""

    def work(comm: Communicator) -> list[float]:
        weights = gather_weights(comm, comm.rank + 1.0)
        comm.all_gather(torch.full((1,), 7.0, dtype=torch.float64))
        return list(weights.tolist())

    assert run_workers(2, work) == [[1.0, 2.0]] * 2
