# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of the boundary stack: what is written, what is read, what is refused."""

from __future__ import annotations

import itertools
import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from trtllm_mhc.models import safetensors

BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture(scope="module")
def checkpoints(trt: Any) -> Any:
    from trtllm_mhc.models.deepseek_v41 import checkpoint

    return checkpoint


@pytest.fixture(scope="module")
def config(trt: Any) -> Any:
    from trtllm_mhc.models.deepseek_v41 import DeepseekV41Config

    return DeepseekV41Config(hidden_size=64, num_hidden_layers=2, o_groups=2, o_lora_rank=8, mlp_size=16)


@pytest.fixture(scope="module")
def weights(config: Any) -> Any:
    from trtllm_mhc.models.deepseek_v41 import ModelWeights

    return ModelWeights(config, seed=9)


@pytest.fixture
def folder(checkpoints: Any, config: Any, weights: Any, tmp_path: Path) -> Path:
    checkpoints.write_checkpoint(tmp_path / "ckpt", config, weights, 2)
    return tmp_path / "ckpt"


def test_what_is_written_is_read(checkpoints: Any, config: Any, weights: Any, folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "rank0.safetensors", "rank1.safetensors"]
    assert checkpoints.read_config(folder) == (config, 2)
    for rank in (0, 1):
        shard = checkpoints.RankWeights(config, checkpoints.read_tensors(folder, config, rank, 2), rank, 2)
        for index in (0, 1):
            for ours, theirs in (
                (shard.layer(index), weights.layer(index)),
                (shard.attention(index, rank, 2), weights.attention(index, rank, 2)),
                (shard.mlp(index, rank, 2), weights.mlp(index, rank, 2)),
            ):
                for name, value in vars(theirs).items():
                    assert np.array_equal(getattr(ours, name), value), name
        assert np.array_equal(shard.engram(1).key, weights.engram(1).key)
        assert np.array_equal(shard.final_norm(), weights.final_norm())


def test_ranks_have_different_shards_and_the_same_boundaries(checkpoints: Any, config: Any, folder: Path) -> None:
    first, second = (checkpoints.read_tensors(folder, config, rank, 2) for rank in (0, 1))
    differ = {name for name in first if not np.array_equal(first[name], second[name])}
    assert {name.split(".", 2)[-1] for name in differ} == {
        "attention.columns",
        "attention.gain",
        "attention.wo_b.weight",
        "mlp.gate",
        "mlp.up",
        "mlp.down.weight",
    }


def test_files_are_what_the_format_says(folder: Path) -> None:
    """Read by hand, and by the format's own package where there is one."""
    data = (folder / "rank0.safetensors").read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    assert (8 + length) % 8 == 0
    entry = header["layers.1.engram.key"]
    first, last = entry["data_offsets"]
    assert (entry["dtype"], entry["shape"], last - first) == ("BF16", [1, 1, 64], 128)
    ends = sorted(tuple(each["data_offsets"]) for each in header.values())
    assert ends[0][0] == 0
    assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(ends))
    assert ends[-1][1] == len(data) - 8 - length


def test_files_by_the_formats_own_package(folder: Path) -> None:
    package = pytest.importorskip("safetensors")
    ours = safetensors.load(folder / "rank1.safetensors")
    with package.safe_open(folder / "rank1.safetensors", framework="np") as file:
        assert set(file.keys()) == set(ours)
        assert np.array_equal(file.get_tensor("layers.0.hc_attn.fn"), ours["layers.0.hc_attn.fn"])


def test_nothing_is_written_when_anything_is_wrong(
    checkpoints: Any, config: Any, weights: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "final_norm", lambda: np.zeros(63, np.float32))
    expected = r"weights of rank 0: final_norm.weight: expected bfloat16 \[64\], got float32 \[63\]"
    with pytest.raises(checkpoints.CheckpointError, match=expected):
        checkpoints.write_checkpoint(tmp_path / "ckpt", config, weights, 2)
    assert not (tmp_path / "ckpt").exists()


def test_ranks_that_do_not_divide(checkpoints: Any, config: Any, weights: Any, tmp_path: Path) -> None:
    with pytest.raises(checkpoints.CheckpointError, match="expected a multiple of tp_size 3, got 16"):
        checkpoints.write_checkpoint(tmp_path / "ckpt", config, weights, 3)


def _change(folder: Path, change: Any) -> None:
    path = folder / "rank0.safetensors"
    tensors = {name: np.array(tensor) for name, tensor in safetensors.load(path).items()}
    change(tensors)
    safetensors.save(path, tensors)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("layers.0.mlp.up"), r"layers.0.mlp.up: expected bfloat16 \[8, 64\], is missing"),
        (lambda t: t.update(surplus=np.zeros(1, np.int32)), "surplus: not expected"),
        (
            lambda t: t.update({"layers.0.mlp.up": t["layers.0.mlp.up"].T.copy()}),
            r"layers.0.mlp.up: expected bfloat16 \[8, 64\], got bfloat16 \[64, 8\]",
        ),
        (
            lambda t: t.update({"layers.1.hc_ffn.scale": np.zeros(3, BF16)}),
            r"layers.1.hc_ffn.scale: expected float32 \[3\], got bfloat16 \[3\]",
        ),
    ],
)
def test_tensors_that_do_not_fit(checkpoints: Any, config: Any, folder: Path, change: Any, message: str) -> None:
    _change(folder, change)
    with pytest.raises(checkpoints.CheckpointError, match=message):
        checkpoints.read_tensors(folder, config, 0, 2)


def test_many_problems_are_counted(checkpoints: Any, config: Any, folder: Path) -> None:
    _change(folder, dict.clear)
    with pytest.raises(checkpoints.CheckpointError, match=r"and \d\d more$"):
        checkpoints.read_tensors(folder, config, 0, 2)


@pytest.mark.parametrize("size", [0, 7, 8, 100, -1])
def test_files_cut_short(checkpoints: Any, config: Any, folder: Path, size: int) -> None:
    path = folder / "rank0.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(checkpoints.CheckpointError, match=r"rank0\.safetensors"):
        checkpoints.read_tensors(folder, config, 0, 2)


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"{",
        b'{"x": 1}',
        b'{"x": {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]}}',
        b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"x": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}',
        b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [8, 12]}}',
        b'{"x": {"dtype": "F32", "shape": ["1"], "data_offsets": [0, 4]}}',
    ],
)
def test_headers_that_lie(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(safetensors.FormatError, match=r"x\.safetensors"):
        safetensors.load(path)


def test_tensors_of_other_writers_may_lie_unaligned(tmp_path: Path) -> None:
    header = b'{"__metadata__": {"by": "x"}, "x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + struct.pack("<f", 2.5))
    assert len(header) % 4
    assert safetensors.load(path)["x"].tolist() == [2.5]


def test_dtypes_that_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="x: expected bfloat16, float32 or int32, got float64"):
        safetensors.save(tmp_path / "x", {"x": np.zeros(1)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "LlamaForCausalLM"}, "expected 'DeepseekV41ForCausalLM', got 'LlamaForCausalLM'"),
        ({"dtype": "float16"}, "dtype: expected 'bfloat16', got 'float16'"),
        ({"mapping": {"world_size": 4, "tp_size": 2, "pp_size": 2}}, "no other parallelism"),
        ({"hc_eps": "small"}, "hc_eps: expected float, got 'small'"),
        ({"hidden_size": 64.5}, "hidden_size: expected int, got 64.5"),
        ({"hidden_size": 0}, "hidden_size: expected 1 or more, got 0"),
        ({"engram_layers": 1}, "engram_layers: expected a list of integers, got 1"),
    ],
)
def test_configs_that_are_refused(checkpoints: Any, folder: Path, change: dict[str, Any], message: str) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(checkpoints.CheckpointError, match=message):
        checkpoints.read_config(folder)


def test_configs_without_a_dimension(checkpoints: Any, folder: Path) -> None:
    path = folder / "config.json"
    content = json.loads(path.read_text())
    del content["hc_mult"]
    path.write_text(json.dumps(content))
    with pytest.raises(checkpoints.CheckpointError, match="hc_mult: is missing"):
        checkpoints.read_config(folder)
    path.write_text("{")
    with pytest.raises(checkpoints.CheckpointError, match="not JSON"):
        checkpoints.read_config(folder)


def test_shards_answer_for_their_own_rank_only(checkpoints: Any, config: Any, folder: Path) -> None:
    shard = checkpoints.RankWeights(config, checkpoints.read_tensors(folder, config, 1, 2), 1, 2)
    with pytest.raises(checkpoints.CheckpointError, match="expected the shard of rank 0 of 2, got that of rank 1 of 2"):
        shard.mlp(0, 0, 2)
