"""Stored models, stacks of RBMs, cache files and checkpoints as fuzz targets."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from fuzz import seeds
from fuzz.child import Target
from fuzz.seeds import file_of
from fuzz.targets_kaldi import NNET

from ddnn.data.cache_file import END, CacheDamaged, CacheFile, Footer, Index, write_cache
from ddnn.data.corpus import FeaturePipeline
from ddnn.data.split import Utterances, split_by_speakers_file
from ddnn.data.transform import InputTransform
from ddnn.errors import DataError
from ddnn.kaldi.nnet1 import read_nnet1
from ddnn.model.acoustic import AcousticModel, load_model, save_model
from ddnn.model.exchange import from_nnet1
from ddnn.model.network import Layer, Network
from ddnn.recipe.load import load_recipe
from ddnn.train.pretrain import load_stack

KEY = "0" * 64
_TRAILER = struct.Struct("<QI8s")
TENSORS = (
    b'"F32"',
    b'"F64"',
    b'"F16"',
    b'"BF16"',
    b'"I64"',
    b'"U8"',
    b'"BOOL"',
    b'"F8_E4M3"',
    b'"F8_E8M0"',
    b'"F4"',
    b'"C64"',
    b'"U16"',
    b'"dtype":',
    b'"shape":',
    b'"data_offsets":',
    b"[0,0]",
    b"[]",
    b"[0]",
    b'"__metadata__":',
    b'"ddnn"',
    b"layer0.weight",
    b"layer0.bias",
    b"transform.shift",
    b"sigmoid",
    b"softmax",
    b'\\"inputs\\": ',
    b'\\"splice\\": ',
    b'\\"dim\\": ',
    b"[[",
    b"{",
    b"}",
    b"\xff" * 7,
)


def tiny_model(layers: int = 2, hidden: int = 4, top: bool = True) -> AcousticModel:
    generator = torch.Generator().manual_seed(1)
    shape = [Layer(6 if n == 0 else hidden, hidden, "sigmoid") for n in range(layers - top)]
    if top:
        shape.append(Layer(hidden, 3, "softmax", 1.0, 0.5, 0.25))
    size = sum(layer.num_parameters for layer in shape)
    transform = InputTransform((-1, 0), 3, torch.arange(6.0), torch.ones(6))
    return AcousticModel(
        FeaturePipeline("mean", 0), transform, Network(tuple(shape), torch.rand(size, generator=generator))
    )


def model_bytes() -> bytes:
    """A stored model."""
    return file_of(lambda path: save_model(path, tiny_model()), "final.safetensors")


def stack_bytes() -> bytes:
    """A stored stack of RBMs, as the recipe beside it wants one."""
    transform = InputTransform((-1, 0, 1), 2, None, None)
    model = AcousticModel(FeaturePipeline("none", 0), transform, tiny_model(2, 4, top=False).network)
    return file_of(lambda path: save_model(path, model), "stack.safetensors")


def with_header(inner: bytes) -> bytes:
    """A safetensors file of a damaged header and the tensors behind it: the header's length is right."""
    head, _, tail = inner.partition(b"\n#\n")
    return struct.pack("<Q", len(head)) + head + tail


def apart(stored: bytes) -> bytes:
    """What `with_header` makes whole again."""
    size = struct.unpack("<Q", stored[:8])[0]
    return stored[8 : 8 + size] + b"\n#\n" + stored[8 + size :]


def _header(name: str, change: dict[str, Any]) -> bytes:
    """A model whose description says something else."""
    head, _, tail = apart(model_bytes()).partition(b"\n#\n")
    told = json.loads(head)
    about = json.loads(told["__metadata__"]["ddnn"])
    about.update(change)
    told["__metadata__"]["ddnn"] = json.dumps(about)
    assert name
    return json.dumps(told).encode() + b"\n#\n" + tail


def _headers() -> tuple[bytes, ...]:
    layer = {"inputs": 6, "outputs": 4, "activation": "sigmoid", "weight_rate": 1.0, "bias_rate": 1.0, "max_norm": 0.0}
    wrong = [
        {"layers": []},
        {"layers": [{**layer, "inputs": 2**62}]},
        {"layers": [{**layer, "outputs": 10**400}]},
        {"layers": [{**layer, "weight_rate": 10**400}]},
        {"layers": [{**layer, "activation": ["sigmoid"]}]},
        {"layers": [{**layer, "activation": {}}]},
        {"layers": 7},
        {"splice": []},
        {"splice": [0] * 10_000},
        {"splice": "ab"},
        {"splice": [True, False]},
        {"dim": 2**70},
        {"pipeline": {"cmvn": [], "deltas": 0}},
        {"pipeline": {"cmvn": "none", "deltas": True}},
        {"format": "1"},
    ]
    nested = tuple(b'{"__metadata__":{"ddnn":"' + b"[" * n + b"]" * n + b'"}}\n#\n' for n in (100, 900, 990, 20_000))
    tensors = tuple(
        b'{"__metadata__":{"ddnn":"{}"},"a":{"dtype":"F32","shape":%s,"data_offsets":[0,%d]}}\n#\n' % (shape, size)
        + bytes(24)
        for shape in (
            b"[0,4611686018427387904]",
            b"[4611686018427387904,4]",
            b"[6]",
            b"[-1]",
            b"[1,1,1,1,1,1,6]",
            b"[" + b"1," * 3000 + b"6]",
        )
        for size in (0, 24)
    )
    return (*(_header("about", change) for change in wrong), *nested, *tensors)


def cache_bytes() -> bytes:
    """A cache file of two utterances of 4 and 5 frames, one frame of context."""
    num_frames = np.array([4, 5], np.int64)
    labels = np.array([-1, 0, 1, 2, 0, -1, -1, 0, 1, 2, 2, 1, -1], np.int32)
    index = Index(np.array([0, 2], np.int64), num_frames, np.array([3, 3, 3], np.int64), labels)
    footer = Footer(
        data="/data", dim=2, width=2, context=1, dtype="float32", utterances=2, rows=13, pdfs=3, counts={}, pieces=[]
    )
    store = np.arange(26, dtype=np.float32).tobytes()

    def write_store(descriptor: int, start: int) -> list[tuple[int, int]]:
        import os

        os.pwrite(descriptor, store, start)
        return [(len(store), zlib.crc32(store))]

    return file_of(lambda path: write_cache(path, KEY, footer, index, write_store), "x.corpus")


def _cache(folder: Path) -> None:
    try:
        cached = CacheFile(folder / "x.corpus", KEY)
        try:
            cached.check(3, 1)
            assert len(cached.store.tobytes()) == cached.footer.store_bytes
            assert cached.index.labels.max() < cached.footer.pdfs
        finally:
            cached.close()
    except (CacheDamaged, OSError) as error:  # the caller warns and loads anew
        raise DataError(str(error)) from error


def unsealed(stored: bytes) -> bytes:
    """A cache file's front and store, and its footer, without what `sealed` puts right."""
    length = _TRAILER.unpack(stored[-_TRAILER.size :])[0]
    return stored[: -_TRAILER.size - length][4096:] + b"\n#\n" + stored[-_TRAILER.size - length : -_TRAILER.size]


def sealed(inner: bytes) -> bytes:
    """A cache file of damaged indices and footer whose checksums are all right."""
    body, _, text = inner.rpartition(b"\n#\n")
    front = (b"ddnn corpus cache 1\n" + KEY.encode() + b"\n").ljust(4096, b"\0") + body
    try:
        footer = json.loads(text)
        footer["pieces"] = [[len(front), zlib.crc32(front)]]
        text = json.dumps(footer).encode()
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    return front + text + _TRAILER.pack(len(text), zlib.crc32(text), END)


def _from_nnet1(folder: Path) -> None:
    model = from_nnet1(
        read_nnet1(folder / "final.nnet"), read_nnet1(folder / "front.nnet"), where=folder / "final.nnet"
    )
    save_model(folder / "final.safetensors", model)


def _nnet1_beside(folder: Path) -> None:
    (folder / "final.nnet").write_bytes(seeds.network(binary=True))
    (folder / "front.nnet").write_bytes(seeds.front(binary=True))


STACK_RECIPE = """data: {train: x, alignments: x, splice: 1, normalise: false}
model: {hidden_layers: 2, hidden_units: 4}
init: rbm
pretrain: {from: stack}
"""


def _stack(folder: Path) -> None:
    recipe = load_recipe(folder / "recipe.yaml", must_exist=False)
    load_stack(recipe, folder / "stack")


def _stack_beside(folder: Path) -> None:
    (folder / "stack").mkdir()
    (folder / "recipe.yaml").write_text(STACK_RECIPE)


def _speakers(folder: Path) -> None:
    corpus = SimpleNamespace(speakers=("a", "b", "c"), num_frames=np.array([1, 2, 3]))
    split_by_speakers_file(cast(Utterances, corpus), folder / "speakers")


def model_targets() -> list[Target]:
    """safetensors, cache files, nnet1 imports, speakers files."""
    model, cached = model_bytes(), cache_bytes()
    fronts = tuple(seeds.front(binary=binary) for binary in (True, False))
    return [
        Target(
            "model",
            "final.safetensors",
            lambda folder: load_model(folder / "final.safetensors"),
            (model,),
            (b"\xff" * 8 + b"{", struct.pack("<Q", 2**40) + b"{}"),
            tokens=TENSORS,
        ),
        Target(
            "model, header",
            "final.safetensors",
            lambda folder: load_model(folder / "final.safetensors"),
            (apart(model),),
            _headers(),
            pack=with_header,
            tokens=TENSORS,
        ),
        Target(
            "stack of RBMs",
            "stack/stack.safetensors",
            _stack,
            (apart(stack_bytes()),),
            beside=_stack_beside,
            pack=with_header,
            tokens=TENSORS,
            inputs=100,
        ),
        Target("cache file", "x.corpus", _cache, (cached,), tokens=(END,)),
        Target(
            "cache file, resealed",
            "x.corpus",
            _cache,
            (unsealed(cached),),
            pack=sealed,
            tokens=(
                b'"rows":',
                b'"dim":',
                b'"width":',
                b'"context":',
                b'"utterances":',
                b'"pdfs":',
                b'"float16"',
                b'"counts":{}',
                b'"pieces":[]',
            ),
        ),
        Target(
            "nnet1 import, network",
            "final.nnet",
            _from_nnet1,
            (seeds.network(binary=True), seeds.network(binary=False)),
            beside=_nnet1_beside,
            tokens=NNET,
        ),
        Target("nnet1 import, feature transform", "front.nnet", _from_nnet1, fronts, beside=_nnet1_beside, tokens=NNET),
        Target(
            "speakers file",
            "speakers",
            _speakers,
            (b"a\nb\n",),
            (b"a " * 30_000, b"x%d " * 9000),
            per_byte=250,
            inputs=300,
        ),
    ]
