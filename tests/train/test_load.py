"""A training from a cache file ends in the bits of one from the archives."""

from __future__ import annotations

from pathlib import Path

import pytest
from corpora import labelled_utterances, write_ali_dir, write_data_dir, write_recipe

from ddnn.data import fill, loaders
from ddnn.kaldi.tables import MatrixReader
from ddnn.recipe.load import load_recipe
from ddnn.train.command import run_training


@pytest.mark.parametrize("cv", ["held out", "a data dir"])
def test_the_cache_changes_no_bit(tmp_path: Path, cv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    features, labels = labelled_utterances()
    data, ali = write_data_dir(tmp_path / "train", features), write_ali_dir(tmp_path / "ali", labels)
    recipe = write_recipe(tmp_path / "recipe.yaml", data, ali)
    settings = ["data.cmvn=mean", "data.loaders=2"]
    if cv == "a data dir":
        features, labels = labelled_utterances(seed=3)
        other, other_ali = write_data_dir(tmp_path / "cv", features), write_ali_dir(tmp_path / "cv ali", labels)
        settings += [f"data.cv.data={other}", f"data.cv.alignments={other_ali}", "data.cv.speakers_file=null"]
        settings += ["data.cv.fraction=null"]
    cached = [*settings, f"data.cache={tmp_path / 'made' / 'cache'}"]

    def trained(name: str, given: list[str]) -> list[bytes]:
        run_training(load_recipe(recipe, given), tmp_path / name, "cpu")
        return [(tmp_path / name / file).read_bytes() for file in ("final.safetensors", "ali_train_pdf.counts")]

    plain = trained("plain", settings)
    assert not (tmp_path / "made").exists()
    with monkeypatch.context() as patched:  # two processes write the file
        patched.setattr(loaders, "BYTES_FOR_A_PROCESS", 1)
        patched.setattr(fill, "CHUNK_BYTES", 1000)
        assert trained("writes", cached) == plain
    monkeypatch.setattr(MatrixReader, "read", None)
    assert trained("maps", cached) == plain
    assert len(list((tmp_path / "made/cache").iterdir())) == (2 if cv == "a data dir" else 1)
    log = (tmp_path / "maps/train.log").read_text()
    assert "cache: mapped" in log and "cache: wrote" not in log
    assert "by 2 process(es)" in (tmp_path / "writes/train.log").read_text()
    assert load_recipe(tmp_path / "maps/recipe.yaml").data.cache == tmp_path / "made/cache"
