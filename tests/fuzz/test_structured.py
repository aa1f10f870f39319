"""Sound files but for one lie: headers with any sizes in front of any bytes. Random damage seldom gets as far."""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from fuzz import seeds
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddnn.kaldi.archive import iterate_int_vectors, iterate_matrices
from ddnn.kaldi.fst import read_fst
from ddnn.kaldi.lattice import iterate_lattices
from ddnn.kaldi.nnet1_file import read_nnet1
from ddnn.kaldi.transition_model import read_transition_model
from ddnn.nn.acoustic_model import load_model
from ddnn.runs.metrics import read_metrics
from ddnn.util.errors import UserError

INT32 = st.sampled_from([0, 1, 2, 3, 255, 65_536, 2**24, 2**31 - 1, -1, -2, -(2**31)]) | st.integers(
    -(2**31), 2**31 - 1
)
INT64 = st.sampled_from([0, 1, 4, -1, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63)]) | st.integers(-(2**63), 2**63 - 1)
BYTES = st.binary(max_size=80)
MODEST = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("structured") / "x"


def given_or_refused(read: Callable[[Path], object], path: Path, data: bytes) -> None:
    """A result or a `UserError`, in some megabytes, whatever sizes are claimed."""
    path.write_bytes(data)
    tracemalloc.start()
    try:
        read(path)
    except UserError as error:
        assert str(path) in str(error)
    finally:
        taken = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert taken < 8 << 20


def sized(value: int) -> bytes:
    return struct.pack("<Bi", 4, value)


@MODEST
@given(token=st.sampled_from([b"FM ", b"DM ", b"CM ", b"CM2 ", b"CM3 "]), rows=INT32, columns=INT32, data=BYTES)
def test_matrices_of_any_claim(path: Path, token: bytes, rows: int, columns: int, data: bytes) -> None:
    dims = struct.pack("<ffii", 0.0, 1.0, rows, columns) if token[:1] == b"C" else sized(rows) + sized(columns)
    given_or_refused(lambda x: list(iterate_matrices(x)), path, b"utt \0B" + token + dims + data)


@MODEST
@given(count=INT32, values=st.lists(INT32, max_size=9))
def test_integers_of_any_claim(path: Path, count: int, values: list[int]) -> None:
    given_or_refused(
        lambda x: list(iterate_int_vectors(x)), path, b"u \0B" + sized(count) + b"".join(map(sized, values))
    )


@MODEST
@given(
    token=st.sampled_from(
        ["AffineTransform", "Sigmoid", "ParametricRelu", "Splice", "AddShift", "Rescale", "Rbm", "Copy", "Dropout", "X"]
    ),
    dims=st.tuples(INT32, INT32),
    inner=st.lists(st.tuples(st.sampled_from([b"FM ", b"FV ", b"DM ", b"DV ", b""]), INT32, INT32, BYTES), max_size=3),
)
def test_components_of_any_dims(
    path: Path, token: str, dims: tuple[int, int], inner: list[tuple[bytes, int, int, bytes]]
) -> None:
    parts = [
        kind + sized(rows) + (sized(columns) if kind[1:2] == b"M" else b"") + data
        for kind, rows, columns, data in inner
    ]
    data = b"\0B<Nnet> <" + token.encode() + b"> " + b"".join(map(sized, dims)) + b"".join(parts) + b"</Nnet> "
    given_or_refused(read_nnet1, path, data)


SIZE = st.integers(0, 4) | INT32
NAMES = {
    b"ConvolutionalComponent": (b"PatchDim", b"PatchStep", b"PatchStride"),
    b"MaxPoolingComponent": (b"PoolSize", b"PoolStep", b"PoolStride"),
}


@MODEST
@given(
    token=st.sampled_from(list(NAMES)),
    dims=st.tuples(SIZE, SIZE),
    sizes=st.tuples(SIZE, SIZE, SIZE),
    filters=st.tuples(SIZE, SIZE, SIZE),
    count=SIZE,
)
def test_convolutions_and_pools_of_any_sizes(
    path: Path, token: bytes, dims: tuple[int, ...], sizes: tuple[int, ...], filters: tuple[int, ...], count: int
) -> None:
    data = b"".join(b"<" + name + b"> " + sized(size) for name, size in zip(NAMES[token], sizes, strict=True))
    if token == b"ConvolutionalComponent":
        rows, columns, length = filters
        data += b"<Filters> FM " + sized(rows) + sized(columns) + bytes(min(4 * max(rows, 0) * max(columns, 0), 400))
        data += b"<Bias> FV " + sized(length) + bytes(min(4 * max(length, 0), 400))
    network = b"<Nnet> <" + token + b"> " + b"".join(map(sized, dims)) + data + b"</Nnet> "
    given_or_refused(read_nnet1, path, b"\0B" + network)
    nested = b"<Nnet> <ParallelComponent> " + b"".join(map(sized, dims)) + b"<NestedNnetCount> " + sized(count)
    given_or_refused(read_nnet1, path, b"\0B" + nested + (b"<NestedNnet> " + sized(1) + network) * 2)


@MODEST
@given(
    phones=st.lists(INT32, max_size=4),
    table=st.lists(INT32, max_size=4),
    counts=st.lists(INT32, max_size=12),
    data=BYTES,
)
def test_topologies_of_any_counts(
    path: Path, phones: list[int], table: list[int], counts: list[int], data: bytes
) -> None:
    vectors = [sized(len(v)) + b"".join(struct.pack("<i", x) for x in v) for v in (phones, table)]
    body = b"<TransitionModel> <Topology> " + b"".join(vectors) + b"".join(map(sized, counts)) + data
    given_or_refused(read_transition_model, path, b"\0B" + body + b"</Topology> <Triples> " + sized(2**31 - 1))


@MODEST
@given(
    kind=st.sampled_from(["const", "vector"]),
    version=st.integers(0, 3),
    flags=st.integers(0, 8),
    start=INT64,
    states=INT64,
    arcs=INT64,
    data=BYTES,
)
def test_graphs_of_any_claim(
    path: Path, kind: str, version: int, flags: int, start: int, states: int, arcs: int, data: bytes
) -> None:
    name = kind.encode()
    header = struct.pack("<ii", 2125659606, len(name)) + name + struct.pack("<i", 8) + b"standard"
    given_or_refused(read_fst, path, header + struct.pack("<iiQqqq", version, flags, 1, start, states, arcs) + data)


@MODEST
@given(
    kind=st.sampled_from([b"lattice4", b"compactlattice44", b"compactlattice84", b"lattice"]),
    version=st.integers(1, 3),
    start=INT64,
    states=INT64,
    data=BYTES,
)
def test_lattices_of_any_claim(path: Path, kind: bytes, version: int, start: int, states: int, data: bytes) -> None:
    header = struct.pack("<ii", 2125659606, 6) + b"vector" + struct.pack("<i", len(kind)) + kind
    numbers = struct.pack("<iiQqqq", version, 0, 3, start, states, 0)
    given_or_refused(lambda x: list(iterate_lattices(x)), path, b"utt " + header + numbers + data)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["F32", "BF16", "F8_E4M3", "sigmoid", "none", 10**400]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
ABOUT = st.dictionaries(st.sampled_from(["format", "pipeline", "splice", "dim", "layers"]), JSON, max_size=5)
LAYER = st.fixed_dictionaries(
    {},
    optional={name: JSON for name in ("inputs", "outputs", "activation", "weight_rate", "bias_rate", "max_norm")},
)


def text(value: object) -> str:
    """JSON, also of numbers that Python would not write."""
    return json.dumps(value, default=str)


@MODEST
@given(
    about=ABOUT,
    layers=st.none() | st.lists(LAYER, max_size=3),
    tensors=st.dictionaries(
        st.sampled_from(["layer0.weight", "layer0.bias", "transform.shift"]),
        st.tuples(
            st.sampled_from(["F32", "F64", "BF16", "BOOL", "F8_E4M3", "U8", "C64", "F4"]),
            st.lists(INT64, max_size=3),
            INT64,
            INT64,
        ),
        max_size=3,
    ),
    data=BYTES,
)
def test_models_of_any_description(path: Path, about: dict, layers: list | None, tensors: dict, data: bytes) -> None:  # type: ignore[type-arg]
    told = {"format": 1, "pipeline": {"cmvn": "none", "deltas": 0}, "splice": [0], "dim": 1, **about}
    told["layers"] = told.get("layers", []) if layers is None else layers
    header: dict[str, object] = {"__metadata__": {"ddnn": text(told)}}
    for name, (dtype, shape, start, end) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    head = json.dumps(header).encode()
    given_or_refused(load_model, path, struct.pack("<Q", len(head)) + head + data)


@MODEST
@given(
    rows=st.lists(
        st.dictionaries(
            st.sampled_from(
                ["type", "epoch", "split", "rank", "loss", "frame_accuracy", "frames", "minibatches", "seconds", "host"]
            ),
            JSON | st.sampled_from(["cv", "train", "worker", "epoch", "event", 0, 1]),
            max_size=9,
        ),
        max_size=3,
    )
)
def test_metrics_of_any_values(path: Path, rows: list[dict]) -> None:  # type: ignore[type-arg]
    given_or_refused(read_metrics, path, "".join(text(row) + "\n" for row in rows).encode("utf-8", "surrogatepass"))


@pytest.mark.parametrize("depth", [*range(900, 1010, 3), 30_000])
def test_json_of_any_depth(path: Path, depth: int) -> None:
    """There are depths that are read, but too deep to be shown."""
    row = b'{"type": "epoch", "split": "cv", "epoch": ' + b"[" * depth + b"]" * depth + b"}\n"
    given_or_refused(read_metrics, path, row)
    about = text({"format": 1, "splice": 0}).replace("0}", "[" * depth + "]" * depth + "}")
    head = json.dumps({"__metadata__": {"ddnn": about}}).encode()
    given_or_refused(load_model, path, struct.pack("<Q", len(head)) + head)


def test_the_seeds_themselves_are_read(path: Path) -> None:
    for data in (seeds.final_mdl(), seeds.transitions(binary=False, chain=True)):
        path.write_bytes(data)
        assert read_transition_model(path).num_pdfs >= 3
