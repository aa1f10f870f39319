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

from ddnn.data.cache import CacheFile, CacheIndex, CorruptCacheError
from ddnn.data.dataset import InputTransform
from ddnn.data.feature_reader import FeatureConfig
from ddnn.data.index import UtteranceIndex, hold_out_listed
from ddnn.kaldi.nnet1_file import read_nnet1
from ddnn.nn.acoustic_model import AcousticModel, from_nnet1, load_model, save_model
from ddnn.nn.layer import Layer
from ddnn.nn.layers import Affine
from ddnn.nn.network import Network
from ddnn.recipe.load import load_recipe
from ddnn.training.pretraining import load_dbn
from ddnn.util.errors import DataError

KEY = "0" * 64
CACHE = "x.features"
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
    b'\\"in_features\\": ',
    b'\\"splice\\": ',
    b'\\"dim\\": ',
    b"[[",
    b"{",
    b"}",
    b"\xff" * 7,
)


def tiny_model(layers: int = 2, hidden: int = 4, top: bool = True) -> AcousticModel:
    generator = torch.Generator().manual_seed(1)
    shape: list[Layer] = [Affine(6 if n == 0 else hidden, hidden, "sigmoid") for n in range(layers - top)]
    if top:
        shape.append(Affine(hidden, 3, "softmax", 1.0, 0.5, 0.25))
    size = sum(layer.num_parameters for layer in shape)
    transform = InputTransform((-1, 0), 3, torch.arange(6.0), torch.ones(6))
    return AcousticModel(
        FeatureConfig("mean", 0), transform, Network(tuple(shape), torch.rand(size, generator=generator))
    )


def model_bytes() -> bytes:
    """A stored model."""
    return file_of(lambda path: save_model(path, tiny_model()), "final.safetensors")


def stack_bytes() -> bytes:
    """A stored stack of RBMs, as the recipe beside it wants one."""
    transform = InputTransform((-1, 0, 1), 2, None, None)
    model = AcousticModel(FeatureConfig("none", 0), transform, tiny_model(2, 4, top=False).network)
    return file_of(lambda path: save_model(path, model), "dbn.safetensors")


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
    layer = Affine(6, 4).config()
    format_1 = {"inputs": 6, "outputs": 4, "activation": "sigmoid", "weight_rate": 1.0, "bias_rate": 1.0}
    wrong = [
        {"layers": []},
        {"layers": [{**layer, "in_features": 2**62}]},
        {"layers": [{**layer, "out_features": 10**400}]},
        {"layers": [{**layer, "learn_rate_coef": 10**400}]},
        {"layers": [{**layer, "activation": ["sigmoid"]}]},
        {"layers": [{**layer, "activation": {}}]},
        {"layers": [{**layer, "kind": ["affine"]}]},
        {"layers": [{**layer, "kind": "conv"}]},
        {"layers": [{}, 7]},
        {"layers": 7},
        {"format": 1, "pipeline": {"cmvn": "mean", "deltas": 0}, "layers": [format_1, 7]},
        {"format": 1, "layers": [{**format_1, "inputs": 2**62}]},
        {"splice": []},
        {"splice": [0] * 10_000},
        {"splice": "ab"},
        {"splice": [True, False]},
        {"dim": 2**70},
        {"features": {"cmvn": [], "deltas": 0}},
        {"features": {"cmvn": "none", "deltas": True}},
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


INDEX = CacheIndex(
    key=KEY, dim=2, selected=[0, 2], num_frames=[4, 5],
    pdf_counts=[3, 3, 3], counts={}, mismatch="", blocks=[],
)  # fmt: skip


def cache_bytes() -> bytes:
    """A cache file of two utterances of 4 and 5 frames, one frame of context."""
    labels = np.array([-1, 0, 1, 2, 0, -1, -1, 0, 1, 2, 2, 1, -1], np.int32)
    body = np.arange(26, dtype=np.float32).tobytes() + labels.tobytes()
    return sealed(body + SEPARATOR + INDEX.model_dump_json().encode())


def _cache(folder: Path) -> None:
    try:
        cache = CacheFile(folder / CACHE, KEY, 3, FeatureConfig(splice=1))
        try:
            cache.check(1)
            body = cache.features.tobytes() + cache.labels.tobytes()
            assert len(body) == sum(size for size, _ in cache.stored.blocks) and len(cache.labels) == cache.rows
        finally:
            cache.close()
    except (CorruptCacheError, OSError) as error:  # the caller warns and loads from the archives
        raise DataError(str(error)) from error


TRAILER, SEPARATOR = struct.Struct("<QL"), b"\n#\n"


def unsealed(stored: bytes) -> bytes:
    """The data of a cache file and its index, without what `sealed` puts right."""
    length, _ = TRAILER.unpack(stored[-TRAILER.size :])
    end = len(stored) - TRAILER.size
    return stored[: end - length] + SEPARATOR + stored[end - length : end]


def sealed(inner: bytes) -> bytes:
    """A cache file of damaged data and index whose checksums are all right."""
    body, _, text = inner.rpartition(SEPARATOR)
    try:
        index = CacheIndex.model_validate_json(text)
        return body + index.model_copy(update={"blocks": [(len(body), zlib.crc32(body))]}).encode()
    except ValueError:
        return body + text + TRAILER.pack(len(text), zlib.crc32(text))


def _from_nnet1(folder: Path) -> None:
    model = from_nnet1(
        read_nnet1(folder / "final.nnet"), read_nnet1(folder / "front.nnet"), location=folder / "final.nnet"
    )
    save_model(folder / "final.safetensors", model)


def _nnet1_beside(folder: Path) -> None:
    (folder / "final.nnet").write_bytes(seeds.network(binary=True))
    (folder / "front.nnet").write_bytes(seeds.front(binary=True))


STACK_RECIPE = """data: {train: x, alignments: x, splice: 1, normalize: false}
model: {hidden_layers: 2, hidden_units: 4}
init: rbm
pretrain: {dbn: stack}
"""


def _stack(folder: Path) -> None:
    recipe = load_recipe(folder / "recipe.yaml", must_exist=False)
    load_dbn(recipe, folder / "stack")


def _stack_beside(folder: Path) -> None:
    (folder / "stack").mkdir()
    (folder / "recipe.yaml").write_text(STACK_RECIPE)


def _speakers(folder: Path) -> None:
    corpus = SimpleNamespace(speakers=("a", "b", "c"), num_frames=np.array([1, 2, 3]))
    hold_out_listed(cast(UtteranceIndex, corpus), folder / "speakers", "speaker")


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
            "stack/dbn.safetensors",
            _stack,
            (apart(stack_bytes()),),
            beside=_stack_beside,
            pack=with_header,
            tokens=TENSORS,
            inputs=100,
        ),
        Target("cache file", CACHE, _cache, (cached,), tokens=TENSORS),
        Target(
            "cache file, resealed",
            CACHE,
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
                b'"blocks":[]',
            ),
        ),
        Target(
            "nnet1 import, network",
            "final.nnet",
            _from_nnet1,
            tuple(make(binary=binary) for make in (seeds.network, seeds.layers) for binary in (True, False)),
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
