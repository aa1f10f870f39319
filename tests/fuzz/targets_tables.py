"""Kaldi's tables as fuzz targets: archives, scp, alignments, statistics, text."""

from __future__ import annotations

import struct
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from corpora import write_model, write_transforms
from fuzz import seeds
from fuzz.child import Target
from fuzz.targets_kaldi import MODEL

from ddnn.kaldi.alignments import pdf_counts, read_alignments, read_pdf_counts
from ddnn.kaldi.archive import MatrixReader, RecordReader, iterate_int_vectors, iterate_matrices, read_scp
from ddnn.kaldi.data_dir import apply_cmvn, read_cmvn_stats, read_data_dir, read_text, read_utt2spk
from ddnn.kaldi.lattice import iterate_lattices, read_lattice, write_lattices
from ddnn.kaldi.transforms import mismatched_options, read_transform_config, read_transforms
from ddnn.kaldi.transition_model import read_transition_model
from ddnn.lattices.criteria import SequenceCriterion
from ddnn.util.errors import DataError

HUGE = b"\xff\xff\xff\x7f"


RECORD = (
    b"\0B",
    b"FM ",
    b"DM ",
    b"CM ",
    b"CM2 ",
    b"CM3 ",
    b"FV ",
    b"DV ",
    b"PKL",
    b"\4",
    b"\x08",
    b"\4" + HUGE,
    b" [",
    b"]\n",
    b"utt1 ",
    b"\n",
    b"WAVE",
    b"\x1f\x8b\x08",
    b"\x93NUMPY",
    b"RIFF",
    b"ajkg",
)


WIDE = 300_000

LATTICES = ("compactlattice44", "compactlattice84", "lattice4", "lattice8", "text", "state-level text")


def _by_scp(folder: Path) -> None:
    """By offsets, with ranges and without."""
    with MatrixReader() as reader:
        for entry in read_scp(folder / "feats.scp"):
            reader.shape(entry)
            reader.read(entry)


def _scp_beside(folder: Path) -> None:
    ranges = ("", "[0:1]", "[:,1:1]", "[1:1,0:1]")
    (folder / "feats.scp").write_text("".join(f"a{n} feats.ark:2{some}\n" for n, some in enumerate(ranges)))


def _matrices(name: str, folder: Path) -> None:
    for _ in iterate_matrices(folder / name):
        pass


def _lattices(folder: Path) -> None:
    """At most 500: each takes a third of a millisecond, however small it is."""
    lattices = list(islice(iterate_lattices(folder / "lat.ark"), 500))
    write_lattices(folder / "again.ark", folder / "again.scp", lattices)


def _model_beside(folder: Path) -> None:
    write_model(folder / "final.mdl", range(4))


def _trained(folder: Path) -> None:
    """As a training copies and reads them, each with a derivative, of numbers or not; at most 300, see above."""
    model, copy = read_transition_model(folder / "final.mdl"), folder / "copy.scp"
    write_lattices(folder / "copy.ark", copy, islice(iterate_lattices(folder / "lat.1.gz"), 300), relative=True)
    with RecordReader() as reader:
        read = [read_lattice(reader, entry) for entry in read_scp(copy)[:20]]
    for lattice in read:
        frames = lattice.num_frames
        if 0 < frames < 500 and lattice.tids.max() <= model.num_transition_ids:
            loglikes, reference = np.zeros((frames, model.num_pdfs), np.float32), np.ones(frames, np.int32)
            for criterion in ("smbr", "mmi"):
                value = SequenceCriterion(criterion, model, (2,))(lattice, loglikes, reference)
                assert value.derivative.shape == loglikes.shape


def _integers(name: str, folder: Path) -> None:
    for _ in iterate_int_vectors(folder / name):
        pass


def _scp(folder: Path) -> None:
    problem = None
    for pipes in (False, True):
        try:
            entries = read_scp(folder / "feats.scp", allow_pipes=pipes)
            with MatrixReader() as reader:
                for entry in entries[:20]:
                    if entry.pipe is None:
                        reader.shape(entry)
                        reader.read(entry)
        except DataError as error:
            problem = error
    if problem is not None:
        raise problem


def _ali_dir(folder: Path) -> None:
    pdf_counts(read_alignments(folder / "ali"))


def _ali_beside(folder: Path) -> None:
    (folder / "ali").mkdir()
    write_model(folder / "ali/final.mdl")
    (folder / "ali/ali.1.gz").write_bytes(seeds.zipped(seeds.transition_ids()))
    (folder / "ali/num_jobs").write_text("1\n")


def _data_beside(folder: Path) -> None:
    (folder / "feats.ark").write_bytes(seeds.archive())
    (folder / "feats.scp").write_text("".join(f"{name} feats.ark:{at}\n" for name, at in _offsets(seeds.archive())))
    (folder / "utt2spk").write_bytes(seeds.UTT2SPK)
    (folder / "one.mat").write_bytes(b" [ 1 2\n3 4 ]\n")


def _offsets(archive: bytes) -> list[tuple[str, int]]:
    return [(name, archive.index(name.encode() + b" ") + len(name) + 1) for name in seeds.MATRICES]


def _cmvn_beside(folder: Path) -> None:
    _data_beside(folder)
    (folder / "cmvn.scp").write_text(f"spk0 cmvn.ark:5\nspk1 cmvn.ark:{seeds.cmvn().index(b'spk1') + 5}\n")


def _cmvn(folder: Path) -> None:
    data = read_data_dir(folder)
    stats = read_cmvn_stats(data.cmvn or {}, data.speaker_of("data.cmvn"))
    for matrix in seeds.MATRICES.values():
        for own in stats.values():
            for variance in (False, True):
                if own.shape[1] == 4:
                    assert np.isfinite(apply_cmvn(matrix, own, variance=variance)).all()


def _transforms_beside(folder: Path) -> None:
    write_transforms(folder / "tri4", ("spk0", "spk1"), jobs=1)


def _transforms(folder: Path) -> None:
    config, names = read_transform_config(folder / "tri4"), ("spk0-a", "spk1-a")
    found = read_transforms(folder / "tri4", config, 4, names, ("spk0", "spk1"), folder)
    own = found.fmllr or {}
    for name in names:
        assert config.apply(np.ones((3, 4), np.float32), found.final_mat, own.get(name)).shape == (3, config.width(4))
    mismatched_options(folder / "tri4", folder, "mean", 0, 4)
    mismatched_options(None, folder / "tri4", "none", 1, 4)


def _transform_targets() -> tuple[Target, ...]:
    with tempfile.TemporaryDirectory() as folder:
        _transforms_beside(Path(folder))
        matrix, trans = ((Path(folder) / "tri4" / name).read_bytes() for name in ("final.mat", "trans.1"))
    read: dict[str, Any] = {"read": _transforms, "beside": _transforms_beside}
    options = (b"--left-context=1 --right-context=2\n", b"")
    return (
        Target("final.mat", "tri4/final.mat", seeds=(matrix,), tokens=RECORD, inputs=300, **read),
        Target("fMLLR transforms", "tri4/trans.1", seeds=(trans,), tokens=RECORD, inputs=300, **read),
        Target("splice_opts", "tri4/splice_opts", seeds=options[:1], crafted=(b"'" * 9000,), inputs=300, **read),
        Target("cmvn_opts", "tri4/cmvn_opts", seeds=(b"--norm-vars=true --norm-means=true\n",), inputs=300, **read),
    )


def _claims(*tokens: bytes) -> tuple[bytes, ...]:
    """Matrix headers that claim what is not there."""
    dims = [
        (2**31 - 1, 2**31 - 1),
        (2**31 - 1, 1),
        (1, 2**31 - 1),
        (-1, -1),
        (-(2**31), -(2**31)),
        (65536, 65536),
        (0, 5),
        (5, 0),
    ]
    found = []
    for token in tokens:
        for rows, columns in dims:
            if token.startswith(b"CM"):
                found.append(b"a \0B" + token + bytes(8) + struct.pack("<ii", rows, columns) + bytes(40))
            else:
                found.append(b"a \0B" + token + struct.pack("<BiBi", 4, rows, 4, columns) + bytes(40))
    return tuple(found)


def _wide_compressed() -> bytes:
    header = np.array([0.0, 1.0], "<f4").tobytes() + np.array([1, WIDE], "<i4").tobytes()
    return b"a \0BCM " + header + bytes(9 * WIDE)


def table_targets() -> list[Target]:
    """Archives in sequence and by scp, alignment dirs, CMVN, utt2spk, transcripts, pdf counts."""
    words = b"1 " * 40_000
    archives = tuple(seeds.archive(dtype, compress=c) for dtype in (np.float32, np.float64) for c in (False, True))
    archives += (seeds.compressed_archive(b"CM2"), seeds.compressed_archive(b"CM3"), seeds.text_archive())
    bombs = tuple(
        seeds.zipped(start + fill * (1 << 19))
        for start in (b"utt ", b"utt [", b"utt [\n1 ", b"utt \0BFM \4\0\0\0\1\4\1\0\0\0", b"")
        for fill in (b" ", b"\n", b"0", b"0 ", b"\0", b"[", b";")
    )
    text_numbers = tuple(
        b"utt [ " + number + b" ]\n" for number in (b"1" * 30_000 + b"x", b"1_0", b"0x1p3", b"-", b"1" * 5000)
    )
    return [
        Target(
            "archive of matrices",
            "feats.ark",
            lambda folder: _matrices("feats.ark", folder),
            archives,
            (
                *_claims(b"FM ", b"DM ", b"CM ", b"CM2 ", b"CM3 "),
                *text_numbers,
                b"a \0B" + b"PKLx",
                b"a [ " + words,
                b"a [\n" + b"1\n" * 30_000 + b"]\n",
                _wide_compressed(),
                b" " * 300_000,
                b"a [" + b"\n" * 300_000 + b"]",
            ),
            tokens=RECORD,
            per_byte=200,
        ),
        Target(
            "matrix by scp",
            "feats.ark",
            _by_scp,
            (*(a.replace(b"spk0-utt0 ", b"a ", 1) for a in archives[:-1]), b"a [ 1 2\n3 4 ]\n"),
            _claims(b"FM ", b"DM ", b"CM ", b"CM2 ", b"CM3 "),
            beside=_scp_beside,
            tokens=RECORD,
            per_byte=200,
        ),
        Target(
            "archive of matrices, gzip",
            "feats.gz",
            lambda folder: _matrices("feats.gz", folder),
            tuple(map(seeds.zipped, archives)),
            bombs,
            per_byte=3000,
        ),
        Target(
            "archive of matrices, within its gzip",
            "feats.gz",
            lambda folder: _matrices("feats.gz", folder),
            archives,
            _claims(b"FM ", b"CM "),
            pack=seeds.zipped,
            tokens=RECORD,
            per_byte=3000,
        ),
        Target(
            "archive of lattices",
            "lat.ark",
            _lattices,
            tuple(map(seeds.lattices, LATTICES)),
            (
                b"a \n" + b"0 1 1\n" * 9000 + b"1\n\n",
                b"a \n" + b"".join(b"%d %d 1\n" % (n, n + 1) for n in range(5000)) + b"5000\n\n",
                b"a \n0 1 1 1,2," + b"1_" * 30_000 + b"1\n1\n\n",
                b"a \n0 2147483647 1\n2147483647\n\n",
            ),
            tokens=(*RECORD, b"compactlattice44", b"lattice4", b"\0\0\x80\x7f", b"0,0,1_2", b"Infinity"),
            per_byte=400,
        ),
        Target(
            "archive of lattices, gzip, trained",
            "lat.1.gz",
            _trained,
            tuple(map(seeds.lattices, LATTICES)),
            beside=_model_beside,
            pack=seeds.zipped,
            tokens=(*RECORD, b"\0\0\x80\x7f", b"\0\0\x80\xff", b"\xff\xff\x7f\x7f", b"1e38,-1e38,1_2"),
            per_byte=400,
        ),
        Target(
            "archive of integers",
            "pdfs",
            lambda folder: _integers("pdfs", folder),
            (seeds.integers(), seeds.integers(text=True)),
            (
                b"a \0B\4" + HUGE,
                b"a \0B\4\xff\xff\xff\xff",
                b"a " + b"1" * 5000 + b"\n",
                b"a " + words + b"\n",
                b"a 1_0\n",
            ),
            tokens=RECORD,
        ),
        Target(
            "archive of integers, gzip",
            "pdfs.gz",
            lambda folder: _integers("pdfs.gz", folder),
            (seeds.zipped(seeds.integers()),),
            bombs,
            per_byte=3000,
        ),
        Target(
            "scp",
            "feats.scp",
            _scp,
            (b"a feats.ark:10\nb one.mat\nc feats.ark:10[0:1]\nd  feats.ark:10[0:1,1:2]\n",),
            (
                b"a | cat\n",
                b"a cat x |\n",
                b"a ../../../etc/passwd\n",
                b"a /dev/zero\n",
                b"a -\n",
                b"a " + b"x" * 5000 + b"\n",
                b"a " + b":1" * 20_000 + b"\n",
                b"a x\0y\n",
                b"a feats.ark:10[99999999999:1]\n",
                b"\n" * 50_000,
                b"a\n" * 50_000,
            ),
            beside=_data_beside,
            tokens=(b"feats.ark", b":10", b"[0:1]", b"[:,0:1]", b" |", b"| ", b"/proc/self/mem"),
            per_byte=250,
        ),
        Target(
            "alignment dir, ali.1.gz",
            "ali/ali.1.gz",
            _ali_dir,
            (seeds.transition_ids(), b"a 1 1 3 5\nb 6\n"),
            beside=_ali_beside,
            pack=seeds.zipped,
            tokens=RECORD,
            per_byte=3000,
        ),
        Target(
            "alignment dir, final.mdl",
            "ali/final.mdl",
            _ali_dir,
            (seeds.final_mdl(),),
            beside=_ali_beside,
            tokens=MODEL,
        ),
        Target(
            "alignment dir, num_jobs", "ali/num_jobs", _ali_dir, (b"1\n", b"1"), (b"9" * 9, b"2\n"), beside=_ali_beside
        ),
        *_transform_targets(),
        Target("CMVN statistics", "cmvn.ark", _cmvn, (seeds.cmvn(),), beside=_cmvn_beside, tokens=RECORD, inputs=300),
        Target(
            "utt2spk",
            "utt2spk",
            lambda folder: read_utt2spk(folder / "utt2spk"),
            (seeds.UTT2SPK,),
            (b"a a\n" * 9000, b"a\n", b"a b c\n"),
            per_byte=250,
        ),
        Target(
            "transcripts",
            "text",
            lambda folder: read_text(folder / "text"),
            (seeds.TEXT,),
            (b"a " + words,),
            per_byte=250,
        ),
        Target(
            "pdf counts",
            "counts",
            lambda folder: read_pdf_counts(folder / "counts"),
            (seeds.counts(binary=True), seeds.counts(binary=False)),
            (b" [ 1e308 1e308 ]\n", b" [ nan ]\n", b" [ " + b"1" * 30_000 + b"x ]", b"[ " + words + b"]"),
            tokens=(b"FV ", b"\0B", b"[", b"]"),
        ),
    ]
