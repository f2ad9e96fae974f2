# SPDX-License-Identifier: Apache-2.0
"""The commands and their options. Each command's work is in a module of its own, imported when it runs."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:
    from trtllm_mhc.runtime.communicator import CommunicatorOptions

app = typer.Typer(
    name="trtllm-mhc",
    help="The fused all-reduce and mHC boundary of DeepSeek V4.1 for TensorRT.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


class AllReduceKind(StrEnum):
    """The layer of the unfused all-reduce."""

    plugin = "plugin"
    dist_collective = "dist_collective"


class SublayerKind(StrEnum):
    """What stands between the boundaries of the demo's network."""

    matmul = "matmul"
    none = "none"


class CoefficientsKind(StrEnum):
    """How a sublayer's mixes are computed: by a hundred layers of TensorRT's own, or by one of this project's."""

    native = "native"
    plugin = "plugin"


class SeparateCollapse(StrEnum):
    """What a collapse is whose products are added one by one."""

    keep = "keep"
    fuse = "fuse"


def _console() -> Console:
    """Logs have no width of their own; rich would take 80 columns, too few for the tables."""
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 120
    return console


def _numbers(text: str, option: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"expected numbers separated by commas, got {text!r}", param_hint=option) from None


@app.command()
def doctor(
    group: Annotated[
        bool, typer.Option("--group", help="Make a group of ranks instead, and say what it decided and why.")
    ] = False,
    tp: Annotated[
        int | None, typer.Option(help="With --group: ranks. Default: all processes of the launch, or 2 threads.")
    ] = None,
    hidden_size: Annotated[int, typer.Option(help="With --group: H.")] = 5120,
    capacity: Annotated[int | None, typer.Option(help="With --group: rows of a mailbox slot.")] = None,
    lanes: Annotated[int, typer.Option(help="With --group: independent mailboxes.")] = 1,
    timeout_s: Annotated[float | None, typer.Option(help="With --group: seconds of every wait.")] = None,
    nccl_rows: Annotated[
        int, typer.Option(help="With --group: M from which on NCCL is used; 0: without peer access, -1: never.")
    ] = 0,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="With --group: write the report here; -: to the output, alone.")
    ] = None,
) -> None:
    """Say what this machine has of what is needed, and what is missing.

    Exit code 0: engines can be built and run here. 3: something is missing for that (named in the table), what is there
    works. 1: something is broken.

    With --group: ranks are the processes of a launch (torchrun, mpirun, or variables; docs/ranks.md), or threads. Exit
    code 0: the group was made. 1: it was not, and why is said. 3: there is no GPU.
    """
    from trtllm_mhc.cli import doctor as machine
    from trtllm_mhc.cli import doctor_group

    if not group:
        raise typer.Exit(machine.run(_console()))
    options: CommunicatorOptions = {"lanes": lanes, "nccl_rows": nccl_rows}
    if capacity is not None:
        options["capacity"] = capacity
    if timeout_s is not None:
        options["timeout_s"] = timeout_s
    raise typer.Exit(doctor_group.run(doctor_group.GroupOptions(tp, hidden_size, options), json_path, _console()))


@app.command()
def bench(
    only: Annotated[
        str, typer.Option(help="Of boundary, boundary_mxfp8, consumer, local, coefficients, stack.")
    ] = "boundary,boundary_mxfp8,consumer,local,coefficients,stack",
    tp: Annotated[str, typer.Option(help="Group sizes.")] = "1,2,4,8",
    modes: Annotated[
        str,
        typer.Option(help="single (tp 1), self_loop (a rank plays all), loopback (on one GPU), nvlink (a GPU each)."),
    ] = "single,self_loop,loopback,nvlink",
    rows: Annotated[str, typer.Option(help="Values of M.")] = "1,2,4,8,16,32,64",
    against: Annotated[
        str, typer.Option(help="The peers.")
    ] = "sglang_fused,unfused_push,unfused_triton,unfused_nccl,tensorrt,tensorrt_nccl",
    peers: Annotated[Path | None, typer.Option(help="What scripts/fetch_peers.sh made.", file_okay=False)] = None,
    layers: Annotated[int, typer.Option(min=1, help="Decoder layers of the stack.")] = 40,
    sublayers: Annotated[str, typer.Option(help="Of the stack: none, matmul or both.")] = "none,matmul",
    json_path: Annotated[Path | None, typer.Option("--json", help="Add the rows here.", dir_okay=False)] = None,
    record: Annotated[
        Path | None,
        typer.Option("--records", help="Show these rows instead of measuring.", exists=True, dir_okay=False),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the times as SVG.", dir_okay=False)] = None,
    table: Annotated[
        Path | None, typer.Option(help="Renew the table in this document.", exists=True, dir_okay=False)
    ] = None,
    gate: Annotated[
        Path | None,
        typer.Option(help="Ratios that must hold; below one the exit code is 1.", exists=True, dir_okay=False),
    ] = None,
    commit: Annotated[str | None, typer.Option(envvar="GIT_COMMIT", help="Commit to note in the rows.")] = None,
) -> None:
    """Measure the operations and their peers side by side, in CUDA graphs. Ratios are printed first.

    Exit code 1: something failed, computed something wrong, or is below its gate.
    """
    from trtllm_mhc.cli.bench import BenchOptions, Files, run

    options = BenchOptions(
        ops=only.split(","),
        tps=_numbers(tp, "--tp"),
        modes=modes.split(","),
        rows=_numbers(rows, "--rows"),
        peers=peers,
        against=against.split(","),
        layers=layers,
        sublayers=sublayers.split(","),
        commit=commit,
    )
    raise typer.Exit(run(options, Files(record, json_path, plot, table, gate), _console()))


@app.command()
def bench_linear(
    tp: Annotated[int, typer.Option(help="Ranks that the one rank plays: 2, 4 or 8.")] = 2,
    rows: Annotated[str, typer.Option(help="Values of M.")] = "1,8,16,64",
    features: Annotated[str, typer.Option(help="Values of K, the input features of a rank.")] = "1024,2048,4096",
    json_path: Annotated[Path | None, typer.Option("--json", help="Add the rows here.", dir_okay=False)] = None,
    commit: Annotated[str | None, typer.Option(envvar="GIT_COMMIT", help="Commit to note in the rows.")] = None,
) -> None:
    """Measure the projection that publishes its output beside cuBLAS (through torch) and a publish kernel."""
    from trtllm_mhc.cli.bench_linear import run

    sizes = _numbers(rows, "--rows"), _numbers(features, "--features")
    raise typer.Exit(run(tp, *sizes, json_path, commit, _console()))


@app.command()
def demo(
    tp: Annotated[int, typer.Option(help="Ranks: 1, 2, 4 or 8. They share GPUs where there are fewer.")] = 2,
    layers: Annotated[int, typer.Option(min=1, help="Decoder layers; two boundaries each.")] = 40,
    rows: Annotated[int, typer.Option(min=1, help="Tokens of a step (M).")] = 8,
    inputs: Annotated[
        int | None,
        typer.Option(min=2, help="Generated inputs to compare over. Default: 16 with engines, 4 in the interpreter."),
    ] = None,
    sublayers: Annotated[
        SublayerKind, typer.Option(help="Stand-ins for attention and MoE: real matrices, or elementwise layers only.")
    ] = SublayerKind.matmul,
    coefficients: Annotated[
        CoefficientsKind | None,
        typer.Option(help="The mixes: TensorRT's own layers, or one. Default: plugin with engines, else native."),
    ] = None,
    variant: Annotated[
        str | None,
        typer.Option(
            help="Instead of the stack: one boundary alone, of this kind or of several separated by commas, "
            "fused and unfused; or all."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of weights and inputs.")] = 0,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the record of the run here.", dir_okay=False)
    ] = None,
    timing_cache: Annotated[
        Path | None, typer.Option(help="Keep TensorRT's timing cache in this file, to build faster next time.")
    ] = None,
    commit: Annotated[
        str | None, typer.Option(envvar="GIT_COMMIT", help="Commit to note in the record; default: git's.")
    ] = None,
) -> None:
    """Build DeepSeek V4.1's boundary network, fuse its boundaries, run both forms and compare them.

    With a GPU and a TensorRT that can build: engines for every rank, run in lockstep. Otherwise: both networks
    evaluated by the numpy interpreter. Exit code 0 when every comparison holds, 1 when one does not.
    """
    if variant is not None:
        from trtllm_mhc.cli import demo_variants

        chosen = demo_variants.Options(variant, tp=tp, rows=rows, seed=seed, commit=commit, timing_cache=timing_cache)
        raise typer.Exit(demo_variants.run(chosen, json_path, _console()))
    from trtllm_mhc.cli.demo import DemoOptions, run

    options = DemoOptions(
        tp=tp,
        layers=layers,
        rows=rows,
        inputs=inputs,
        sublayers=sublayers.value,
        seed=seed,
        coefficients=None if coefficients is None else coefficients.value,
        commit=commit,
        timing_cache=timing_cache,
    )
    raise typer.Exit(run(options, json_path, _console()))


@app.command()
def build(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the engines.", file_okay=False)],
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="Checkpoint folder (config.json, rank0.safetensors ...) instead of --seed.", file_okay=False),
    ] = None,
    tp: Annotated[int, typer.Option(help="Ranks: 1, 2, 4 or 8. A checkpoint has its own number.")] = 2,
    layers: Annotated[int, typer.Option(min=1, help="Decoder layers; a checkpoint has its own number.")] = 40,
    seed: Annotated[int, typer.Option(help="Of the generated weights.")] = 0,
    sublayers: Annotated[
        SublayerKind, typer.Option(help="Stand-ins for attention and MoE: real matrices, or elementwise layers only.")
    ] = SublayerKind.matmul,
    coefficients: Annotated[
        CoefficientsKind, typer.Option(help="The mixes: TensorRT's own layers, which build slowly, or one.")
    ] = CoefficientsKind.plugin,
    max_rows: Annotated[int, typer.Option(min=1, help="Most tokens of a step (M).")] = 64,
    opt_rows: Annotated[int, typer.Option(min=1, help="Tokens that the engines are tuned for.")] = 8,
    fuse: Annotated[bool, typer.Option(help="Fuse the boundaries.")] = True,
    require: Annotated[
        int | None, typer.Option(min=0, help="Boundaries that must be fused; default: all that are found.")
    ] = None,
    timing_cache: Annotated[
        Path | None, typer.Option(help="TensorRT's timing cache; default: timing.cache in the output folder.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Everything but the engines; needs no GPU.")] = False,
) -> None:
    """Build every rank's engine of DeepSeek V4.1's boundary stack with TensorRT alone.

    The folder gets rank0.engine and so on, config.json, report.json (what was fused, rank by rank) and the timing
    cache. Exit code 1: nothing was built, and why is said.
    """
    from trtllm_mhc.cli.build import BuildOptions, run

    options = BuildOptions(
        output=output,
        checkpoint=checkpoint,
        tp=tp,
        layers=layers,
        seed=seed,
        sublayers=sublayers.value,
        coefficients=coefficients.value,
        max_rows=max_rows,
        opt_rows=opt_rows,
        fuse=fuse,
        require=require,
        timing_cache=timing_cache,
        dry_run=dry_run,
    )
    raise typer.Exit(run(options, Console()))


@app.command("trtllm-build")
def trtllm_build(
    arguments: Annotated[list[str], typer.Argument(help="Arguments of trtllm-build, after --.", metavar="-- ARGS...")],
    fuse: Annotated[bool, typer.Option(help="Fuse the boundaries.")] = True,
    require: Annotated[
        int | None, typer.Option(min=0, help="Boundaries that every rank must have fused; fewer stop the build.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write all ranks' reports here too; each is beside its engine anyway.")
    ] = None,
) -> None:
    """Run TensorRT-LLM's trtllm-build with the plugins loaded and the boundaries fused.

    For example: trtllm-mhc trtllm-build --require 80 -- --checkpoint_dir ckpt --output_dir engines

    Adds the model file of DeepSeek V4.1 where none is given. Exit code 1: trtllm-build failed, or the model class does
    not go through the pass, or this TensorRT-LLM has no TensorRT backend any more.
    """
    from trtllm_mhc.cli.trtllm_build import TrtllmBuildOptions, run

    options = TrtllmBuildOptions(tuple(arguments), fuse=fuse, require=require, report=report)
    raise typer.Exit(run(options, Console()))


@app.command()
def verify(
    tp: Annotated[int, typer.Option(help="Ranks: 1, 2, 4 or 8. They share GPUs where there are fewer.")] = 2,
    layers: Annotated[int, typer.Option(min=1, help="Decoder layers; two boundaries each.")] = 40,
    rows: Annotated[int, typer.Option(min=1, help="Tokens of a step (M).")] = 8,
    inputs: Annotated[
        int | None,
        typer.Option(min=2, help="Generated inputs to compare over. Default: 16 with engines, 4 in the interpreter."),
    ] = None,
    sublayers: Annotated[
        SublayerKind, typer.Option(help="Stand-ins for attention and MoE: real matrices, or elementwise layers only.")
    ] = SublayerKind.matmul,
    seed: Annotated[int, typer.Option(help="Of weights and inputs.")] = 0,
    all_reduce: Annotated[
        AllReduceKind, typer.Option(help="The unfused all-reduce: this project's, or TensorRT's own layer.")
    ] = AllReduceKind.plugin,
    coefficients: Annotated[
        CoefficientsKind | None,
        typer.Option(help="The mixes: TensorRT's own layers, or one. Default: plugin with engines, else native."),
    ] = None,
    unfused: Annotated[
        Path | None,
        typer.Option(help="Engines instead of built ones: a folder with rank0.engine, ..., or one file for all ranks."),
    ] = None,
    fused: Annotated[Path | None, typer.Option(help="The same of the fused form.")] = None,
    hidden_size: Annotated[int, typer.Option(help="H.")] = 5120,
    data: Annotated[
        str | None, typer.Option(help="Inputs for given engines: a Polygraphy data loader script, FILE[:FUNCTION].")
    ] = None,
    save_engines: Annotated[
        Path | None, typer.Option(help="Write the engines to this folder, for a later run or for Polygraphy.")
    ] = None,
    atol: Annotated[
        float | None, typer.Option(help="Polygraphy's. Default: 3 times the unfused form's distance to float64.")
    ] = None,
    rtol: Annotated[float | None, typer.Option(help="Polygraphy's, relative to the unfused form.")] = None,
    check_error_stat: Annotated[
        str, typer.Option(help="Polygraphy's: elemwise, max, mean, median or quantile.")
    ] = "elemwise",
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the record of the run here.", dir_okay=False)
    ] = None,
    timing_cache: Annotated[
        Path | None, typer.Option(help="Keep TensorRT's timing cache in this file, to build faster next time.")
    ] = None,
    commit: Annotated[
        str | None, typer.Option(envvar="GIT_COMMIT", help="Commit to note in the record; default: git's.")
    ] = None,
) -> None:
    """Compare unfused with fused engines by Polygraphy, and by what it cannot see.

    Beside Polygraphy's comparison: the ranks bit for bit, both forms against an evaluation in float64, every boundary
    against the reference, and the first tensor that is off, with its rank and rows. Without a GPU the numpy interpreter
    evaluates both networks. Exit code 0: everything holds. 1: something differs. 2: it could not be found out.
    """
    from trtllm_mhc.cli.verify import VerifyOptions, run

    options = VerifyOptions(
        tp=tp,
        layers=layers,
        rows=rows,
        inputs=inputs,
        sublayers=sublayers.value,
        seed=seed,
        all_reduce=all_reduce.value,
        coefficients=None if coefficients is None else coefficients.value,
        atol=atol,
        rtol=rtol,
        stat=check_error_stat,
        unfused=unfused,
        fused=fused,
        hidden_size=hidden_size,
        data=data,
        save_engines=save_engines,
        timing_cache=timing_cache,
        commit=commit,
    )
    raise typer.Exit(run(options, json_path, _console()))


# What `rewrite` and `inspect` both have.
TpSize = Annotated[int | None, typer.Option("--tp-size", help="Ranks that sum, where the all-reduce does not tell.")]
Rank = Annotated[int, typer.Option(help="Index in the group, where the all-reduce does not tell; -1: at run time.")]
Group = Annotated[str, typer.Option(help="World ranks of the group, separated by commas; default 0 .. tp-size - 1.")]
Finalize = Annotated[bool, typer.Option(help="Fuse the end of a MoE with the boundary behind it.")]
FuseCoefficients = Annotated[
    bool, typer.Option("--coefficients/--no-coefficients", help="Replace the layers of a sublayer's mixes by one.")
]
Separate = Annotated[
    SeparateCollapse,
    typer.Option(help="Keep or fuse a collapse whose products are added one by one, as the last layer's are."),
]
JsonOrStdout = Annotated[
    Path | None, typer.Option("--json", help="Write the report here; -: to the output, without the table.")
]


@app.command()
def rewrite(
    source: Annotated[Path, typer.Argument(metavar="IN.ONNX", help="The model.", show_default=False)],
    target: Annotated[Path, typer.Argument(metavar="OUT.ONNX", help="May be the same file.", show_default=False)],
    require: Annotated[
        int | None, typer.Option(min=0, help="Boundaries that must be fused; default: all that are found.")
    ] = None,
    json_path: JsonOrStdout = None,
    tp_size: TpSize = None,
    rank: Rank = -1,
    group: Group = "",
    separate_collapse: Separate = SeparateCollapse.keep,
    finalize: Finalize = True,
    coefficients: FuseCoefficients = False,
) -> None:
    """Replace the boundaries of an ONNX model by the plugin's nodes.

    Needs no GPU. Weights in files of their own are not read; they stay where they are, or are copied if the new model
    is in another folder. Exit code 0: enough is fused. 1: less, the model is written all the same. 2: nothing is
    written, and why is said.
    """
    from trtllm_mhc.cli.rewrite import run

    options = (tp_size, rank, group, separate_collapse.value, finalize, coefficients)
    raise typer.Exit(run(source, target, options, require, json_path, _console()))


@app.command()
def inspect(
    file: Annotated[str, typer.Argument(help="*.onnx, *.py[:FUNCTION] or *.engine (*.plan, *.trt).", metavar="FILE")],
    require: Annotated[int | None, typer.Option(min=0, help="Boundaries that must be there.")] = None,
    json_path: JsonOrStdout = None,
    dot: Annotated[
        str | None,
        typer.Option(help="Print the layers around this boundary or layer, for Graphviz, and nothing else."),
    ] = None,
    tp_size: TpSize = None,
    rank: Rank = -1,
    group: Group = "",
    separate_collapse: Separate = SeparateCollapse.keep,
    finalize: Finalize = True,
    coefficients: FuseCoefficients = False,
) -> None:
    """Show the boundaries of an ONNX model, of a network, or of an engine.

    Of a model or network: what the pass would fuse, what it would not, and why. A network is what a function of a
    script returns (load_network, as in Polygraphy). Of an engine, which takes a GPU: how many boundaries are fused, and
    the all-reduces that run beside them because something was marked after the pass. Exit code 0: all right. 1: fewer
    boundaries than required (not given: one is refused), or with --require such an all-reduce. 2: it could not be read.
    """
    from trtllm_mhc.cli.inspect import InspectOptions, run

    options = InspectOptions(
        file, (tp_size, rank, group, separate_collapse.value, finalize, coefficients), require, json_path, dot
    )
    raise typer.Exit(run(options, _console()))
