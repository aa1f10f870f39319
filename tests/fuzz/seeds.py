"""Small valid files, made by ddnn's own writers, to damage."""

from __future__ import annotations

import gzip
import io
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
from corpora import loop_of_words, write_model
from kaldi_files import (
    State,
    build_transition_model,
    fst_bytes,
    lattice_bytes,
    lattice_text,
    model_bytes,
    nnet1_bytes,
    tree_bytes,
)

from ddnn.kaldi.alignments import write_pdf_counts
from ddnn.kaldi.archive import write_int_vectors, write_matrices
from ddnn.kaldi.basic_types import BasicTypeWriter
from ddnn.kaldi.nnet1 import (
    Activation,
    AddShift,
    AffineTransform,
    AveragePoolingComponent,
    Component,
    ConvolutionalComponent,
    Copy,
    Dropout,
    LengthNormComponent,
    MaxPoolingComponent,
    ParallelComponent,
    ParametricRelu,
    RbmComponent,
    Rescale,
    Splice,
)
from ddnn.kaldi.transition_model import HmmState, Topology, TransitionModel
from ddnn.kaldi.tree import ContextDependency, EventMap

RNG = np.random.default_rng(6)
MATRICES = {f"spk{n % 2}-utt{n}": RNG.normal(size=(4 + n, 3)).astype(np.float32) for n in range(4)}
PDFS = {name: RNG.integers(0, 3, len(matrix)).astype(np.int32) for name, matrix in MATRICES.items()}
UTT2SPK = "".join(f"{name} {name[:4]}\n" for name in MATRICES).encode()
TEXT = "".join(f"{name} a b{n}\n" for n, name in enumerate(MATRICES)).encode() + b"spk1-utt9\n"
WORDS = b"<eps> 0\na 1\nb 2\nc 3\n"


def file_of(write: Callable[[Path], object], name: str = "file") -> bytes:
    """The bytes that `write` puts into the file it is given."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / name)
        return (Path(folder) / name).read_bytes()


def archive(dtype: type = np.float32, *, compress: bool = False) -> bytes:
    """A binary archive of `MATRICES`."""
    items = [(name, matrix.astype(dtype)) for name, matrix in MATRICES.items()]
    return file_of(lambda path: write_matrices(path, path.with_suffix(".scp"), items, compress=compress))


def compressed_archive(token: bytes) -> bytes:
    """Records of CM2 or CM3, which our writer makes only of short matrices, and of an empty one."""
    rows, columns = 9, 3
    header = np.array([-1.0, 2.0], "<f4").tobytes() + np.array([rows, columns], "<i4").tobytes()
    size = rows * columns * (2 if token == b"CM2" else 1)
    data = bytes(range(size))
    return b"a \0B" + token + b" " + header + data + b"b \0B" + token + b" " + bytes(16)


def text_archive() -> bytes:
    """A text archive of matrices."""
    lines = [b"utt1  [\n  0.1 2 -3e-2\n  4 5 6 ]\nutt2 [ 1 2 ; 3 4 ]\nutt3 [ ]\nutt4  [\n nan inf 1 ]\n"]
    return b"".join(lines)


def integers(text: bool = False) -> bytes:
    """An archive of pdf-ids."""
    if text:
        return "".join(f"{name} {' '.join(map(str, pdfs))}\n" for name, pdfs in PDFS.items()).encode()
    return file_of(lambda path: write_int_vectors(path, PDFS.items()))


def transition_ids() -> bytes:
    """An archive of transition-ids of `final_mdl`."""
    return file_of(lambda path: write_int_vectors(path, [(name, 2 * pdfs + 1) for name, pdfs in PDFS.items()]))


def final_mdl() -> bytes:
    """Three phones of one state, with Gaussians."""
    return file_of(write_model)


@cache
def transition_model(chain: bool) -> TransitionModel:
    """A model of two sorts of HMMs: left-to-right, or (chain) with two pdf classes in a state."""
    end = HmmState(-1, -1, ())
    if chain:
        entries = ((HmmState(0, 1, ((0, 0.5), (1, 0.5))), end),)
        return build_transition_model(Topology(entries, {1: 0, 2: 0}), [(1, 0, 0, 1), (2, 0, 2, 3)])
    three = (HmmState(0, 0, ((0, 0.75), (1, 0.25))), HmmState(1, 1, ((1, 0.5), (2, 0.25), (0, 0.25))), end)
    one = (HmmState(0, 0, ((0, 0.5), (1, 0.5))), end)
    return build_transition_model(Topology((three, one), {1: 0, 3: 1}), [(1, 0, 0, 0), (1, 1, 1, 1), (3, 0, 2, 2)])


def transitions(*, binary: bool, chain: bool) -> bytes:
    """A transition model alone."""
    return model_bytes(transition_model(chain), binary=binary)


def tree(*, binary: bool) -> bytes:
    """Three phones of one state each, one of them split by its left neighbor."""
    split = EventMap(0, frozenset((1, 3)), (1, 2))
    nodes = (0, 1, 2, split, 3, EventMap(1, None, (None, 0, 3, 4)))
    return tree_bytes(ContextDependency(3, 1, nodes, 4), binary=binary)


def network(*, binary: bool, kind: str = "sigmoid") -> bytes:
    """6 inputs, 4 hidden units, 3 outputs."""
    affine = AffineTransform(RNG.normal(size=(4, 6)).astype(np.float32), np.zeros(4, np.float32), 1.0, 1.0, 0.0)
    top = AffineTransform(RNG.normal(size=(3, 4)).astype(np.float32), np.ones(3, np.float32))
    middle = Activation("relu" if kind == "relu" else "tanh" if kind == "tanh" else "sigmoid", 4)
    parts: list[Component] = [affine, middle, top, Activation("softmax", 3)]
    return nnet1_bytes(parts, binary=binary)


def layers(*, binary: bool) -> bytes:
    """A network of every other component, networks in it; 6 inputs, 3 outputs."""
    rows = RNG.normal(size=(9, 4)).astype(np.float32)
    branch = (ConvolutionalComponent(4, 2, 1, 2, rows[:3], rows[3, :3]), MaxPoolingComponent(3, 1, 1, 3))
    slopes = ParametricRelu(rows[4, :3], rows[5, :3], 0.0, 0.5)
    other: tuple[Component, ...] = (ParallelComponent(((Dropout(1), LengthNormComponent(1)),)),)
    parts: list[Component] = [Copy((5, 0, 1, 2, 2), 6), ParallelComponent(((*branch, slopes), other))]
    parts += [AveragePoolingComponent(4, 2, 1, 1), Activation("tanh", 3)]
    return nnet1_bytes(parts, binary=binary)


def dbn(*, binary: bool) -> bytes:
    """A stack of RBMs that were not yet turned into affine layers, and one that was."""
    weight, bias = RNG.normal(size=(4, 6)).astype(np.float32), np.zeros(4, np.float32)
    parts: list[Component] = [RbmComponent("gauss", "bern", weight, np.zeros(6, np.float32), bias)]
    return nnet1_bytes(parts, binary=binary)


def front(*, binary: bool) -> bytes:
    """A feature transform: splice, shift, rescale to 6 dims."""
    values = np.arange(6, dtype=np.float32)
    parts: list[Component] = [Splice((-1, 0), 3), AddShift(values, 0.0), Rescale(values + 1, 0.0)]
    return nnet1_bytes(parts, binary=binary)


def graph(kind: str) -> bytes:
    """A loop of three words."""
    return fst_bytes(loop_of_words(), kind)


LATTICE: list[State] = [
    (None, [(3, 1.0, -2.0, [1, 2], 2), (4, 1.5, -3.0, [5], 1)]),
    (None, [(0, 0.25, -1.0, [6], 2)]),
    ((0.5, 0.25, [7]), []),
]


def lattices(kind: str) -> bytes:
    """An archive of two lattices. `kind`: an arc type, or `text` or `state-level text`."""
    if kind.startswith("compact"):
        record = lattice_bytes(LATTICE, kind)
    elif kind == "text":
        record = lattice_text(LATTICE)
    else:
        states: list[State] = [(None, [(1, 1.0, 2.0, [1], 1), (0, 0.0, 0.0, [], 2)]), ((0.5, 0.0, []), [])]
        states.append((None, [(2, 0.0, 0.0, [3], 1)]))
        record = lattice_text(states, compact=False) if "text" in kind else lattice_bytes(states, kind)
    return b"utt1 " + record + b"utt2 " + record


def counts(*, binary: bool) -> bytes:
    """Counts of three pdfs."""
    if not binary:
        return file_of(lambda path: write_pdf_counts(path, np.array([5, 9, 0])))
    handle = io.BytesIO()
    writer = BasicTypeWriter(handle)
    writer.marker()
    writer.float_vector(np.array([5.0, 9.0, 0.5], np.float32))
    return handle.getvalue()


def cmvn(dtype: type = np.float64) -> bytes:
    """CMVN statistics of two speakers."""
    stats = np.array([[1.0, -2.0, 3.0, 10.0], [4.0, 5.0, 6.0, 0.0]], dtype)
    return file_of(lambda path: write_matrices(path, path.with_suffix(".scp"), [("spk0", stats), ("spk1", 2 * stats)]))


def zipped(data: bytes) -> bytes:
    """`data` as a gzip."""
    return gzip.compress(data, 1, mtime=0)
