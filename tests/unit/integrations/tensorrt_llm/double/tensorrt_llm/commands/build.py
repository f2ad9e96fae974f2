# SPDX-License-Identifier: Apache-2.0
import argparse
import copy
import os
from concurrent.futures import ProcessPoolExecutor
from importlib.machinery import SourceFileLoader
from multiprocessing import get_context

from tensorrt_llm.builder import BuildConfig, build
from tensorrt_llm.models import MODEL_MAP, PretrainedConfig


def parse_arguments():
    parser = argparse.ArgumentParser()
    for name in ("checkpoint_dir", "model_config", "model_cls_file", "model_cls_name"):
        parser.add_argument(f"--{name}", type=str, default=None)
    parser.add_argument("--output_dir", type=str, default="engine_outputs")
    parser.add_argument("--max_batch_size", type=int, default=2048)
    parser.add_argument("--max_num_tokens", type=int, default=8192)
    parser.add_argument("--opt_num_tokens", type=int, default=None)
    parser.add_argument("--profiling_verbosity", type=str, default="layer_names_only")
    parser.add_argument("--input_timing_cache", type=str, default=None)
    parser.add_argument("--output_timing_cache", type=str, default="model.cache")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--enable_debug_output", default=False, action="store_true")
    parser.add_argument("--dry_run", default=False, action="store_true")
    return parser


def build_and_save(rank, gpu_id, ckpt_dir, build_config, output_dir, log_level, model_config, model_cls, **kwargs):
    config = copy.deepcopy(model_config)
    config.set_rank(rank)
    model_cls = model_cls or MODEL_MAP[config.architecture]
    model = model_cls(config) if ckpt_dir is None else model_cls.from_checkpoint(ckpt_dir, config=config)
    build(model, build_config).save(output_dir)
    return True


def main():
    args = parse_arguments().parse_args()
    os.makedirs(args.output_dir, exist_ok=True)
    model_cls = None
    if args.model_cls_file is not None:
        assert args.model_cls_name is not None
        model_cls = getattr(SourceFileLoader("models", args.model_cls_file).load_module(), args.model_cls_name)
    source = args.checkpoint_dir if args.checkpoint_dir is not None else args.model_config
    if source.lower().endswith(".json"):
        path, folder = source, None
    else:
        path, folder = os.path.join(source, "config.json"), source
    model_config = PretrainedConfig.from_json_file(path)
    names = ("max_batch_size", "max_num_tokens", "opt_num_tokens", "enable_debug_output", "dry_run")
    build_config = BuildConfig(**{name: getattr(args, name) for name in (*names, "profiling_verbosity")})
    ranks = range(model_config.mapping.world_size)
    common = (folder, build_config, args.output_dir, "info", model_config, model_cls)
    if args.workers == 1:
        for rank in ranks:
            build_and_save(rank, 0, *common)
    else:
        with ProcessPoolExecutor(mp_context=get_context("spawn"), max_workers=args.workers) as pool:
            for future in [pool.submit(build_and_save, rank, 0, *common) for rank in ranks]:
                future.result()
