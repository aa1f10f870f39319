"""The cost of a model that several workers share, compared with figures that were computed independently."""

from __future__ import annotations

import math
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ddnn.distributed.cost import (
    Layout,
    Prediction,
    Size,
    choose,
    fisher_update_bytes,
    minibatch_seconds,
    partition,
    predictions,
    received_bytes,
    worker_bytes,
)
from ddnn.reproduce.clusters import CLUSTERS

LARGE = [Size(*dims) for dims in pairwise([440, *[2048] * 6, 8806])]
SMALL = [Size(*dims) for dims in pairwise([440, *[512] * 4, 616])]
NAMES = ("two cores", "H200", "K20, FDR", "K20, Ethernet")
MACHINES = {name: machine for name, (machine, _) in zip(NAMES, CLUSTERS.values(), strict=True)}
AVERAGING_BANDWIDTH = {name: bandwidth for name, (_, bandwidth) in zip(NAMES, CLUSTERS.values(), strict=True)}

# Milliseconds of one worker; speed-ups of k = 2, k = 4; p = 2, p = 4, k = p = 2 with the best number of microbatches;
# averaged gradients with d = 2, 4; a mean every 10 minibatches with d = 2, 4, and with d = k = 2.
SPEED_UPS = {
    ("two cores", "large", 256): "511 1.87 - 1.36(4) - - 1.72 - 1.97 - -",
    ("two cores", "large", 1024): "1860 1.86 - 1.54(8) - - 1.91 - 1.99 - -",
    ("two cores", "small", 256): "17.9 1.48 - 1.33(4) - - 1.73 - 1.97 - -",
    ("two cores", "small", 1024): "65.2 1.46 - 1.52(8) - - 1.92 - 1.99 - -",
    ("H200", "large", 256): "0.454 0.92 1.05 1.06(1) 0.99(1) 0.92(1) 0.90 1.40 1.78 3.37 1.73",
    ("H200", "large", 1024): "0.867 1.04 1.21 1.06(2) 1.12(4) 1.02(1) 1.22 2.02 1.88 3.64 2.01",
    ("H200", "small", 256): "0.108 0.50 0.50 0.82(1) 0.59(1) 0.45(1) 1.44 2.36 1.93 3.74 0.98",
    ("H200", "small", 1024): "0.126 0.51 0.50 0.80(1) 0.56(1) 0.45(1) 1.50 2.51 1.94 3.78 1.00",
    ("K20, FDR", "large", 256): "32.2 1.35 1.69 1.30(4) 1.45(8) 1.62(4) 0.24 0.34 1.16 1.92 1.82",
    ("K20, FDR", "large", 1024): "118 1.35 1.66 1.48(8) 1.72(16) 1.94(8) 0.67 1.01 1.67 3.09 2.38",
    ("K20, FDR", "small", 256): "1.45 0.60 0.54 0.82(2) 0.73(4) 0.53(2) 0.31 0.44 1.30 2.21 1.03",
    ("K20, FDR", "small", 1024): "4.40 0.60 0.52 1.02(4) 1.07(8) 0.63(4) 0.72 1.09 1.70 3.16 1.13",
    ("K20, Ethernet", "large", 256): "32.2 0.95 0.95 1.25(4) 1.36(8) 1.20(4) 0.22 0.30 1.09 1.79 1.37",
    ("K20, Ethernet", "large", 1024): "118 0.94 0.92 1.45(8) 1.66(16) 1.40(8) 0.61 0.91 1.63 2.99 1.69",
    ("K20, Ethernet", "small", 256): "1.45 0.33 0.27 0.65(2) 0.52(4) 0.30(2) 0.28 0.38 1.23 2.06 0.60",
    ("K20, Ethernet", "small", 1024): "4.40 0.31 0.24 0.85(4) 0.79(8) 0.34(4) 0.66 0.98 1.66 3.05 0.61",
}


def test_the_documented_table_is_this_one() -> None:
    lines = (Path(__file__).parents[2] / "docs" / "explanation" / "model-parallel.md").read_text().splitlines()
    known = {
        (cells[0], "large" if cells[1] == "6x2048" else "small", int(cells[2])): " ".join(cells[3:]).replace(",", "")
        for line in lines
        if (cells := [cell.strip() for cell in line.strip("|").split("|")])[0] in MACHINES and len(cells) == 12
    }
    assert known.keys() == SPEED_UPS.keys()
    for row, text in SPEED_UPS.items():
        assert known[row].split() == [cell for cell in text.split() if cell != "-"]


def all_reduce_seconds(name: str, parameters: float, replicas: int) -> float:
    """Recursive halving, then doubling, in float32."""
    if replicas == 1:
        return 0.0
    messages, models = 2 * math.ceil(math.log2(replicas)), 2 * (replicas - 1) / replicas
    return messages * MACHINES[name].latency + models * 4 * parameters / AVERAGING_BANDWIDTH[name]


@pytest.mark.parametrize(("name", "network", "rows"), SPEED_UPS)
def test_the_speed_ups_of_four_machines(name: str, network: str, rows: int) -> None:
    machine, layers = MACHINES[name], LARGE if network == "large" else SMALL
    parameters = sum(layer.parameters for layer in layers)
    alone = minibatch_seconds(machine, layers, rows, Layout())

    def best(columns: int, stages: int) -> Prediction:
        fixed = {"columns": columns, "stages": stages}
        made = predictions(machine, layers, rows, columns * stages, lambda _: 0.0, fixed, min_rows=1)
        return min(made, key=lambda p: p.minibatch_seconds)

    def replicated(replicas: int, period: int, columns: int = 1) -> str:
        sent = all_reduce_seconds(name, parameters / columns, replicas) / period
        return f"{replicas * alone / (best(columns, 1).minibatch_seconds + sent):.2f}"

    pipelines = [best(*shape) for shape in ((1, 2), (1, 4), (2, 2))]
    found = [
        f"{1e3 * alone:.0f}"[:3] + "0" if alone > 1.0 else f"{1e3 * alone:#.3g}".rstrip("."),
        *(f"{alone / best(columns, 1).minibatch_seconds:.2f}" for columns in (2, 4)),
        *(f"{alone / p.minibatch_seconds:.2f}({p.layout.microbatches})" for p in pipelines),
        *(replicated(replicas, period) for period in (1, 10) for replicas in (2, 4)),
        replicated(2, 10, columns=2),
    ]
    expected = SPEED_UPS[name, network, rows].split()
    assert [value if known != "-" else "-" for value, known in zip(found, expected, strict=True)] == expected


FISHER = [Size(*layer[:2], 20, 80) for layer in LARGE], [Size(*layer[:2], 20, 80) for layer in SMALL]


@pytest.mark.parametrize(
    ("layers", "rows", "expected"),
    [
        (FISHER[0], 256, (12.6, 18.9, 0.58, 0.87)),
        (FISHER[0], 1024, (50.3, 75.5, 2.3, 3.5)),
        (FISHER[1], 256, (2.1, 3.1, 0.41, 0.62)),
        (FISHER[1], 1024, (8.4, 12.6, 1.7, 2.5)),
    ],
)
def test_the_bytes_of_a_column_split(layers: list[Size], rows: int, expected: tuple[float, ...]) -> None:
    parts = [received_bytes(MACHINES["two cores"], layers, rows, Layout(1, columns)) for columns in (2, 4)]
    figures = [1e-6 * (part["gathers"] + part["exchanges"]) for part in parts]
    figures += [1e-6 * (part["projections"] + part["norms"]) for part in parts]
    assert [round(value, 2 if value < 1 else 1) for value in figures] == list(expected)
    assert [part["loss"] for part in parts] == [16 * rows, 48 * rows]
    hidden = sum(layer.out_features for layer in layers[:-1])
    averaged = 8 * sum(layer.parameters for layer in layers) / 2
    moved = parts[0]["gathers"] + parts[0]["exchanges"]
    assert (moved < averaged) == (rows < (3249 if hidden > 5000 else 649)), "P / H frames"


def test_the_bytes_of_a_pipeline() -> None:
    machine = MACHINES["two cores"]
    two = received_bytes(machine, LARGE, 256, Layout(1, 1, 2, 4))
    assert two == {**dict.fromkeys(two, 0.0), "boundaries": 4 * 256 * 2048}, "in one direction"
    middle = received_bytes(machine, LARGE, 256, Layout(1, 1, 3, 4))
    assert middle["boundaries"] == 2 * 4 * 256 * 2048, "4.2 MB: activations of one, derivatives of the other boundary"
    both = received_bytes(
        machine, LARGE, 256, Layout(1, 2, 2, 4)
    )  # 5 | 2 layers: the first stage gathers 4 inputs, the last 2
    assert both["gathers"] == both["exchanges"] == 4 * 256 * 4 * 1024
    assert both["boundaries"] == 4 * 256 * 1024 and both["loss"] == 0.0


def test_bytes_of_updates_of_fisher_matrices() -> None:
    updates = fisher_update_bytes(FISHER[1], 3)
    assert updates["sums"] == pytest.approx(8 * 2 / 3 * 5 * (2 * 80**2 + 1))
    assert updates["results"] == 5 * (4 * (20**2 + 20) + 8 * 43 + 4 * (80**2 + 80) + 8 * 163)


def test_ng_sgd_adds_thin_products_and_two_messages_of_a_stage() -> None:
    machine, rows, dims = MACHINES["K20, FDR"], 256, [440, *[512] * 4, 616]
    layout = Layout(1, 2)
    more = minibatch_seconds(machine, FISHER[1], rows, layout) - minibatch_seconds(machine, SMALL, rows, layout)
    products = sum(4 * rows * (20 * dims[i] + 80 * dims[i + 1] / 2) for i in range(5)) / machine.flops
    messages = 2 * machine.latency + 8 / 2 * 5 * (80 * rows + rows + 1) * machine.byte_seconds
    assert more == pytest.approx(20 * machine.product_seconds + products + messages)
    alone = minibatch_seconds(machine, FISHER[1], rows, Layout()) - minibatch_seconds(machine, SMALL, rows, Layout())
    products = sum(4 * rows * (20 * dims[i] + 80 * dims[i + 1]) for i in range(5)) / machine.flops
    assert alone == pytest.approx(20 * machine.product_seconds + products), "one worker sends nothing"


DIVISIONS = st.lists(st.integers(1, 30), min_size=1, max_size=9).flatmap(
    lambda costs: st.tuples(st.just(costs), st.integers(1, len(costs)))
)


@given(DIVISIONS)
@example(([1, 5, 3, 2], 3))  # the sum of squares alone would take 1+5 | 3 | 2
@example(([1, 1, 1, 6], 3))  # stages that are cheaper than the most expensive one are divided evenly, too
def test_layers_are_divided_as_trying_all_divisions_does(division: tuple[list[int], int]) -> None:
    costs, stages = division
    divided = [sum(costs[stage]) for stage in partition(costs, stages)]
    every = [
        [sum(costs[start:end]) for start, end in pairwise((0, *cuts, len(costs)))]
        for cuts in combinations(range(1, len(costs)), stages - 1)
    ]
    assert sum(divided) == sum(costs) and len(divided) == stages
    assert (max(divided), sum(c * c for c in divided)) == min((max(s), sum(c * c for c in s)) for s in every)


def test_the_output_layer_alone_bounds_a_pipeline() -> None:
    flop = [(4 if i == 0 else 6) * layer.in_features * layer.out_features for i, layer in enumerate(LARGE)]
    assert partition(flop, 2) == [slice(0, 6), slice(6, 7)]
    bounds = [sum(flop) / max(sum(flop[stage]) for stage in partition(flop, p)) for p in (2, 3, 4)]
    assert [round(bound, 2) for bound in bounds] == [1.84, 2.20, 2.20]


def test_memory_of_a_worker() -> None:
    fixed, machine, parameters = 1.5 * 2**30, MACHINES["two cores"], sum(layer.parameters for layer in LARGE)
    widths = [440, *[2048] * 6, 8806]
    alone = worker_bytes(machine, LARGE, 1024, Layout())
    assert alone == fixed + 40 * parameters + 4 * 1024 * sum(widths), "88 MB of activations"
    columns = worker_bytes(machine, LARGE, 1024, Layout(columns=2))
    assert columns == fixed + 20 * parameters + 4 * 1024 * (sum(widths[:-1]) + 4403), "inputs are whole"
    piped, last = Layout(stages=2, microbatches=8), LARGE[6]
    first = sum(layer.parameters for layer in LARGE[:6])
    assert worker_bytes(machine, LARGE, 1024, piped) == fixed + 40 * first + 4 * 1024 * sum(widths[:7])
    assert last.parameters < first
    held = worker_bytes(machine, LARGE, 1024, piped, "1f1b")
    assert held == fixed + 40 * first + 2 * 4 * 128 * sum(widths[:7]), "two microbatches of 128 rows"


def chosen(name: str, layers: list[Size], rows: int, workers: int, free: float = 1e12, **fixed: int) -> Layout | None:
    parameters = sum(layer.parameters for layer in layers)

    def averaging(layout: Layout) -> float:
        return all_reduce_seconds(name, parameters / layout.shared_by, layout.replicas) / 10

    prediction = choose(predictions(MACHINES[name], layers, rows, workers, averaging, fixed, min_rows=32), free)
    return prediction and prediction.layout


@pytest.mark.parametrize(
    ("arguments", "fixed", "expected"),
    [
        (("two cores", LARGE, 256, 2), {}, Layout(2)),
        (("two cores", SMALL, 1024, 2), {}, Layout(2)),
        (("H200", LARGE, 1024, 4), {}, Layout(4)),
        (("K20, FDR", SMALL, 256, 4), {}, Layout(4)),
        (("two cores", LARGE, 256, 2), {"replicas": 1}, Layout(1, 2)),
        (("two cores", SMALL, 256, 2), {"replicas": 1}, Layout(1, 2)),
        (("K20, FDR", LARGE, 256, 2), {}, Layout(1, 2)),
        (("K20, Ethernet", LARGE, 256, 2), {}, Layout(1, 1, 2, 4)),
        (("K20, FDR", LARGE, 1024, 4), {"replicas": 1}, Layout(1, 2, 2, 4)),
        (("K20, FDR", LARGE, 256, 4), {"columns": 2, "stages": 1}, Layout(2, 2)),
        (("K20, FDR", LARGE, 256, 2), {"stages": 2, "microbatches": 3}, Layout(1, 1, 2, 3)),
    ],
)
def test_the_layout_that_is_chosen(
    arguments: tuple[str, list[Size], int, int], fixed: dict[str, int], expected: Layout
) -> None:
    assert chosen(*arguments, **fixed) == expected


def test_a_model_that_no_worker_can_hold_is_split() -> None:
    layers = [Size(*dims) for dims in pairwise([440, *[8192] * 8, 32000])]
    assert chosen("K20, FDR", layers, 256, 16, free=5e9) == Layout(1, 8, 2, 4)
    assert chosen("K20, FDR", layers, 256, 16, free=3e9) is None


def test_of_almost_equally_fast_layouts_the_one_that_splits_least_is_chosen() -> None:
    layouts = [Layout(4), Layout(2, 2), Layout(1, 2, 2, 4), Layout(1, 2, 2, 2), Layout(1, 4)]
    seconds = [1.0, 0.96, 0.953, 0.953, 0.9521]
    made = [Prediction(layout, value, value, 1.0, 0.0) for layout, value in zip(layouts, seconds, strict=True)]
    assert choose(made, 2.0) == made[1], "the first is more than 5 % slower than the fastest"
    assert choose(made[2:], 2.0) == made[4], "of as many workers, the one with fewer stages"
    assert choose(made[2:4], 2.0) == made[3], "then the one with fewer microbatches"


def test_no_layout_has_more_columns_than_the_narrowest_layer() -> None:
    layers = [Size(40, 64), Size(64, 6)]
    machine = MACHINES["two cores"]
    found = {p.layout for p in predictions(machine, layers, 256, 8, lambda _: 0.0)}
    assert {layout.columns for layout in found} == {1, 2, 4}
    assert {layout.stages for layout in found} == {1, 2}
    assert {p.layout.columns for p in predictions(machine, layers, 256, 8, lambda _: 0.0, granule=3)} == {1, 2}
    assert {layout.microbatches for layout in found if layout.stages == 2} == {1, 2, 4}, "of 64 rows at least"
