# SPDX-License-Identifier: Apache-2.0
"""Repositories and launch lines. Triton's own parser of config.pbtxt reads what is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from trtllm_mhc.integrations.triton import repository
from trtllm_mhc.integrations.triton.settings import Settings
from trtllm_mhc.integrations.triton.tensors import TensorSpec, numpy_dtype, triton_name

BF16 = np.dtype(ml_dtypes.bfloat16)
INPUTS = [TensorSpec("x", BF16, (-1, 5120)), TensorSpec("gamma", np.dtype(np.float32), (5120,))]
OUTPUTS = [TensorSpec("y", BF16, (-1, 5120))]
ENGINES = [b"engine 0", b"engine 1"]


def read(model: Path) -> Any:
    """The configuration as protobuf's ModelConfig."""
    model_config = pytest.importorskip("tritonclient.grpc.model_config_pb2")
    from google.protobuf import text_format

    return text_format.Parse((model / "config.pbtxt").read_text(), model_config.ModelConfig())


def parameters(config: Any) -> dict[str, str]:
    return {name: value.string_value for name, value in config.parameters.items()}


def test_python_model(tmp_path: Path) -> None:
    settings = Settings(2, 5120, capacity=32, deadline_s=2.5, devices=(0, 3))
    folder = repository.write_python_model(
        tmp_path, "m", ENGINES, INPUTS, OUTPUTS, settings, python_path=[Path("/a b"), 'c"d'], queue_size=7
    )
    assert folder == tmp_path / "m" / "1"
    assert [(folder / f"rank{rank}.engine").read_bytes() for rank in range(2)] == ENGINES
    config = read(tmp_path / "m")
    assert (config.name, config.backend, config.max_batch_size) == ("m", "python", 0)
    types = config.input[0].DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_number
    assert [(i.name, types[i.data_type].name, list(i.dims)) for i in config.input] == [
        ("x", "TYPE_BF16", [-1, 5120]),
        ("gamma", "TYPE_FP32", [5120]),
    ]
    assert len(config.instance_group) == 1
    assert (config.instance_group[0].count, config.instance_group[0].kind) == (1, config.instance_group[0].KIND_MODEL)
    queue = config.dynamic_batching.default_queue_policy
    assert (queue.default_timeout_microseconds, queue.allow_timeout_override, queue.max_queue_size) == (
        2500000,
        True,
        7,
    )
    assert queue.timeout_action == queue.REJECT
    assert Settings.from_parameters(parameters(config)) == settings
    code = (folder / "model.py").read_text()
    compile(code, "model.py", "exec")
    assert 'sys.path[:0] = ["/a b", "c\\"d"]' in code


def test_python_model_is_replaced(tmp_path: Path) -> None:
    repository.write_python_model(tmp_path, "m", ENGINES, INPUTS, OUTPUTS, Settings(2, 5120))
    folder = repository.write_python_model(tmp_path, "m", ENGINES[:1], INPUTS, OUTPUTS, Settings(1, 5120))
    assert sorted(path.name for path in folder.iterdir()) == ["model.py", "rank0.engine"]
    assert "sys.path" not in (folder / "model.py").read_text()


def test_engines_may_be_files(tmp_path: Path) -> None:
    (tmp_path / "engine").write_bytes(b"plan")
    folder = repository.write_python_model(
        tmp_path / "r", "m", [tmp_path / "engine"], INPUTS, OUTPUTS, Settings(1, 5120)
    )
    assert (folder / "rank0.engine").read_bytes() == b"plan"


def test_tensorrt_model_of_one_rank(tmp_path: Path) -> None:
    folder = repository.write_tensorrt_model(tmp_path, "m", ENGINES[:1], INPUTS, OUTPUTS, gpus=[3])
    assert [path.name for path in folder.iterdir()] == ["model.plan"]
    config = read(tmp_path / "m")
    assert config.backend == "tensorrt"
    assert (config.instance_group[0].kind, list(config.instance_group[0].gpus)) == (
        config.instance_group[0].KIND_GPU,
        [3],
    )
    assert not config.parameters


def test_tensorrt_model_of_several_ranks(tmp_path: Path) -> None:
    folder = repository.write_tensorrt_model(tmp_path, "m", ENGINES, INPUTS, OUTPUTS, gpus=[0, 1])
    assert [(folder / f"model.plan.rank{rank}").read_bytes() for rank in range(2)] == ENGINES
    assert (folder / "model.plan").resolve() == (folder / "model.plan.rank0").resolve()
    config = read(tmp_path / "m")
    assert (config.instance_group[0].kind, config.instance_group[0].count) == (config.instance_group[0].KIND_MODEL, 1)
    assert parameters(config) == {
        "enable_multi_device": "true",
        "multi_device_gpus": "0,1",
        "multi_device_per_rank_engines": "true",
    }


def test_wrong_numbers_of_engines(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="each of 3 ranks, got 2"):
        repository.write_python_model(tmp_path, "m", ENGINES, INPUTS, OUTPUTS, Settings(3, 5120))
    with pytest.raises(ValueError, match=r"each of the GPUs \[0\], got 2"):
        repository.write_tensorrt_model(tmp_path, "m", ENGINES, INPUTS, OUTPUTS)
    assert list(tmp_path.iterdir()) == []


def test_fp8_is_refused(tmp_path: Path) -> None:
    outputs = [TensorSpec("y", np.dtype(ml_dtypes.float8_e4m3fn), (-1, 5120))]
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        repository.write_python_model(tmp_path, "m", ENGINES, INPUTS, outputs, Settings(2, 5120))
    assert list(tmp_path.iterdir()) == []


def test_plugins_option() -> None:
    assert repository.tensorrt_backend_options([Path("/a.so"), "/b.so"]) == [
        "--backend-config=tensorrt,plugins=/a.so;/b.so"
    ]
    with pytest.raises(ValueError, match="';'"):
        repository.tensorrt_backend_options(["/a;b.so"])


def test_legacy_launch_preloads_in_every_rank() -> None:
    command = repository.tensorrtllm_launch(Path("/r"), Path("/p/lib.so"), 3)
    assert command[0] == "mpirun"
    ranks = " ".join(command).split(" : ")
    assert len(ranks) == 3
    for rank, line in enumerate(ranks):
        assert "-n 1 -x LD_PRELOAD=/p/lib.so tritonserver" in line
        assert ("--load-model=tensorrt_llm" in line) == (rank > 0)
        assert f"shm-region-prefix-name=prefix{rank}_" in line
    ports = [option for option in command if option.startswith(("--http-port", "--grpc-port"))]
    assert len(set(ports)) == 6


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"tp_size": "2"}, r"expected the parameters \['hidden_size'\]"),
        ({"tp_size": "two", "hidden_size": "1"}, "parameter 'tp_size' of config.pbtxt"),
        ({"tp_size": "2", "hidden_size": "1", "devices": "0"}, r"each of 2 ranks, got \[0\]"),
        ({"tp_size": "2", "hidden_size": "1", "deadline_s": "0"}, "deadline_s: expected more than 0"),
    ],
)
def test_bad_parameters(values: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Settings.from_parameters(values)


def test_foreign_parameters_are_left_alone() -> None:
    values = {"tp_size": "2", "hidden_size": "64", "EXECUTION_ENV_PATH": "/env.tar.gz"}
    assert Settings.from_parameters(values) == Settings(2, 64)


@pytest.mark.parametrize("group", ["json", "json:nothing"])
def test_group_that_is_no_function(group: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="group: "):
        Settings(1, 64, group=group).open(tmp_path)


def test_names_of_types() -> None:
    assert triton_name(ml_dtypes.bfloat16) == "BF16"
    assert numpy_dtype("TYPE_BF16") == BF16
    with pytest.raises(ValueError, match="TYPE_STRING"):
        numpy_dtype("TYPE_STRING")
