# SPDX-License-Identifier: Apache-2.0
"""trtllm-build with fused boundaries, from a tiny checkpoint to engines that run.

1. Writes a checkpoint of DeepSeek V4.1's boundary stack for 2 ranks, small: a few layers, random weights.
2. Runs TensorRT-LLM's trtllm-build on it, through `trtllm-mhc trtllm-build`: fused engines.
3. Builds the same checkpoint with `trtllm-mhc build --no-fuse`, without TensorRT-LLM: unfused engines to compare with.
4. Runs both on the same inputs, every rank in a thread of this process, and compares them with each other and with an
   evaluation in float64.

Needs: TensorRT-LLM 0.17 to 1.2 or a 1.3.0rc with the TensorRT backend, its TensorRT 10, this package, and one GPU
(ranks share it) or more. Without a GPU steps 1 and 2 run up to the engines (--dry_run).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TP = 2
INPUTS = 16
ROWS = 8
HIGHEST_RATIO = 1.05  # of the distances to float64, fused to unfused, at the upper end of its confidence interval


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("trtllm_build_out"), help="folder for everything")
    parser.add_argument("--layers", type=int, default=3, help="decoder layers; two boundaries each")
    parser.add_argument("--json", type=Path, help="write the record of the run here")
    parser.add_argument("--note", help="a remark for the record, such as what stands in for what")
    options = parser.parse_args()
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # for ranks that share a GPU

    from trtllm_mhc.integrations.backend import BackendError, require_backend

    try:
        print(f"TensorRT-LLM {require_backend()}")
    except BackendError as error:
        print(error, file=sys.stderr)
        return 1
    from trtllm_mhc.models.deepseek_v41 import DeepseekV41Config, ModelWeights
    from trtllm_mhc.models.deepseek_v41.checkpoint import write_checkpoint
    from trtllm_mhc.runtime import cuda

    has_gpu = cuda.device_count() > 0
    folders = {name: options.out / name for name in ("checkpoint", "trtllm", "plain")}

    print(f"== 1. checkpoint of {TP} ranks in {folders['checkpoint']}", flush=True)
    config = DeepseekV41Config(hidden_size=4096, num_hidden_layers=options.layers, o_lora_rank=128, mlp_size=256)
    write_checkpoint(folders["checkpoint"], config, ModelWeights(config, seed=1), TP)

    print("== 2. trtllm-build, fused", flush=True)
    build = ["--checkpoint_dir", folders["checkpoint"], "--output_dir", folders["trtllm"]]
    build += ["--max_batch_size", ROWS, "--max_num_tokens", ROWS] + ([] if has_gpu else ["--dry_run"])
    trtllm_mhc("trtllm-build", "--require", config.boundaries, "--", *build)
    record = describe(folders["trtllm"]) | {"engines_built": has_gpu, "note": options.note}

    if has_gpu:
        print("== 3. the same checkpoint without TensorRT-LLM, unfused", flush=True)
        rows = ["--max-rows", ROWS, "--opt-rows", ROWS]
        trtllm_mhc("build", "--checkpoint", folders["checkpoint"], "--output", folders["plain"], "--no-fuse", *rows)
        print("== 4. both engines on the same inputs", flush=True)
        record |= compare(config, folders)
    else:
        print("No GPU: no engine was built; steps 3 and 4 need one.")
    print(json.dumps(record, indent=2))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=2) + "\n")
    if "rms_error_ratio_high" in record and record["rms_error_ratio_high"] > HIGHEST_RATIO:
        print("the fused engines are farther from the exact result than the unfused ones", file=sys.stderr)
        return 1
    return 0


def trtllm_mhc(*arguments: Any) -> None:
    command = [sys.executable, "-m", "trtllm_mhc", *map(str, arguments)]
    print("$ trtllm-mhc", *command[3:], flush=True)
    subprocess.run(command, check=True)


def describe(folder: Path) -> dict[str, Any]:
    """Versions, and what the pass did on every rank."""
    import tensorrt

    ranks = [json.loads((folder / f"mhc_fusion.rank{rank}.json").read_text()) for rank in range(TP)]
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True)
    return {
        "tensorrt_llm": ranks[0]["tensorrt_llm"],
        "tensorrt_llm_is": "double" if ranks[0]["tensorrt_llm"].endswith("double") else "real",
        "tensorrt": tensorrt.__version__,
        "commit": os.environ.get("GIT_COMMIT") or git.stdout.strip() or None,
        "ranks": TP,
        "boundaries": [
            {name: rank["report"][f"boundaries_{name}"] for name in ("found", "fused", "full", "refused")}
            for rank in ranks
        ],
    }


def compare(config: Any, folders: dict[str, Path]) -> dict[str, Any]:
    """Runs the engines of both folders; returns what is worth recording."""
    import ml_dtypes
    import numpy as np

    from trtllm_mhc import reference
    from trtllm_mhc.models.deepseek_v41 import ModelWeights
    from trtllm_mhc.runtime import cuda
    from trtllm_mhc.runtime.build import Plan
    from trtllm_mhc.runtime.engine import EngineGroup, communicators
    from trtllm_mhc.runtime.inspection import count_plugins
    from trtllm_mhc.runtime.threads import ThreadGroup
    from trtllm_mhc.verification.backends import NetworkMaker, split_rows
    from trtllm_mhc.verification.boundary_stack import StackJobs

    rng = np.random.default_rng(7)
    inputs = [rng.normal(size=(ROWS, config.hidden_size)).astype(ml_dtypes.bfloat16) for _ in range(INPUTS)]
    group = ThreadGroup.on_devices(TP)
    record: dict[str, Any] = {"device": cuda.device_info(0).name, "gpus": cuda.device_count()}
    outputs = {}
    with communicators(group, "trtllm_build", hidden_size=config.hidden_size, lanes=2) as ranks:
        for lane, name in enumerate(("trtllm", "plain")):
            plans = [Plan((folders[name] / f"rank{rank}.engine").read_bytes(), 0.0) for rank in range(TP)]
            with EngineGroup(plans, ranks, group, lane=lane) as engines:
                record[f"{name}_engine_inputs"] = engines.input_names
                record[f"{name}_engine_plugins"] = count_plugins(engines.layers)
                # trtllm-build's engines keep an input that the fused layers have no use for; any numbers will do.
                unused = {key: np.zeros(7 * TP + 3, np.int64) for key in engines.input_names if key != "embeddings"}
                outputs[name] = [engines.run([{"embeddings": x, **unused}] * TP) for x in inputs]

    exact = NetworkMaker().runner(
        StackJobs(config, ModelWeights(config, seed=1), TP, "matmul").unfused(), TP, "float64"
    )
    truth = split_rows(exact.run([{"embeddings": np.concatenate(inputs)}] * TP)[0]["hidden_states"], ROWS)
    errors = {
        name: [
            reference.mean_square_error(step[0]["hidden_states"], true) for step, true in zip(steps, truth, strict=True)
        ]
        for name, steps in outputs.items()
    }
    ratio = reference.error_ratio(errors["trtllm"], errors["plain"])
    same = all(reference.bits_equal(*(rank["hidden_states"] for rank in step)).all() for step in outputs["trtllm"])
    return record | {
        "ranks_equal": bool(same),
        "rms_output": float(np.sqrt(np.mean(np.square(np.stack(truth))))),
        "rms_error_fused": ratio.rms_error,
        "rms_error_unfused": ratio.rms_error_baseline,
        "rms_error_ratio": ratio.ratio,
        "rms_error_ratio_high": ratio.high,
    }


if __name__ == "__main__":
    sys.exit(main())
