# SPDX-License-Identifier: Apache-2.0
"""The rewrite pass on ONNX models: built with the operators that exporters use, and exported by torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from trtllm_mhc.reference import assert_bits_equal, ulp_distance

onnx = pytest.importorskip("onnx")
ir = pytest.importorskip("onnx_ir")

import onnx_forms  # noqa: E402
from onnx import TensorProto, helper  # noqa: E402

FILES = Path(__file__).parent / "onnx_files"
HIDDEN = onnx_forms.HIDDEN


def boundary(lead=("M",), forms=onnx_forms.FORMS[0], *, all_reduce=None, opset=onnx_forms.OPSET, outputs=None):
    """A model of one boundary."""
    m = onnx_forms.Model(lead)
    reduced = m.all_reduce("x") if all_reduce is None else all_reduce(m)
    streams = onnx_forms.post(m, forms[0], reduced)
    layer_input = onnx_forms.norm(m, forms[2], onnx_forms.collapse(m, forms[1], streams))
    results = {"streams": streams, "layer_input": layer_input}
    return m.build(results if outputs is None else outputs(m, reduced, results), opset)


def fuse(model, options=None):
    """The rewritten model and the report."""
    from trtllm_mhc.rewrite.onnx import fuse_model

    loaded = ir.from_proto(model)
    report = fuse_model(loaded, options)
    return ir.to_proto(loaded), report


def op_types(model):
    return [node.op_type for node in model.graph.node]


def compare(parse, before, after, feeds, ulps=1):
    """Both models, parsed by TensorRT and evaluated for two ranks."""
    from trtllm_mhc.reference.interpreter import evaluate

    results = [evaluate([parse(model), parse(model)], feeds) for model in (before, after)]
    for old, new in zip(*results, strict=True):
        assert list(new) == list(old)
        for name in old:
            if old[name].ndim > 2 and old[name].shape[-2] == 4:
                assert_bits_equal(new[name], old[name], name)
            else:
                assert ulp_distance(new[name], old[name]).max() <= ulps, name


def feeds_of(lead, finalize=None):
    import rewrite_forms

    batch = "rows" if len(lead) == 1 else "batch_sequence"
    return rewrite_forms.feeds(rewrite_forms.Form(batch=batch, finalize=finalize))


@pytest.mark.parametrize("lead", [("M",), ("B", "S")], ids=["rows", "batch_sequence"])
@pytest.mark.parametrize("form", ["where", "where_int64", "mask"])
def test_finalize(trt, parse, lead, form):
    m = onnx_forms.Model(lead)
    streams = onnx_forms.post(m, "multiply", m.all_reduce(onnx_forms.finalize(m, form)))
    layer_input = onnx_forms.norm(m, "divide", onnx_forms.collapse(m, "multiply", streams))
    model = m.build({"streams": streams, "layer_input": layer_input}, moe=True)
    fused, report = fuse(model)
    assert [each.contribution for each in report.found] == ["finalize"]
    assert "Gather" not in op_types(fused)
    onnx.checker.check_model(fused)
    compare(parse, model, fused, feeds_of(lead, "adds"))
    assert fuse(fused)[1].already_fused == 1


@pytest.mark.parametrize("lead", [("M",), ("B", "S")], ids=["rows", "batch_sequence"])
@pytest.mark.parametrize("forms", onnx_forms.FORMS, ids="-".join)
def test_fused_and_equal(trt, parse, lead, forms):
    model = boundary(lead, forms)
    fused, report = fuse(model)
    assert (report.full, report.refused) == (1, ())
    onnx.checker.check_model(fused)
    assert {each.domain: each.version for each in fused.opset_import} == {"": onnx_forms.OPSET, "trtllm_mhc": 1}
    assert op_types(fused).count("MhcBoundary") == 1
    assert "MhcAllReduce" not in op_types(fused)
    assert [output.name for output in fused.graph.output] == ["streams", "layer_input"]
    ulps = 2 if forms[2] == "operator_narrow" else 1
    assert report.found[0].exactness[-1].startswith(f"layer input: within {ulps} bfloat16 ulp")
    compare(parse, model, fused, feeds_of(lead), ulps)


def test_again_changes_nothing(trt):
    fused, _ = fuse(boundary(("B", "S")))
    again, report = fuse(fused)
    assert (report.found, report.already_fused) == ((), 1)
    # But for shapes of tensors, which are filled in.
    for model in (again, fused):
        del model.graph.value_info[:]
    assert again.SerializeToString(deterministic=True) == fused.SerializeToString(deterministic=True)


@pytest.mark.parametrize("opset", range(18, onnx.defs.onnx_opset_version() + 1))
def test_opsets(trt, opset):
    fused, report = fuse(boundary(opset=opset))
    assert report.full == 1
    onnx.checker.check_model(fused, full_check=False)


def test_dist_collective(trt, parse):
    from trtllm_mhc.rewrite import FuseOptions

    def collective(m, **changes):
        attributes = {"collective_operation": "all_reduce", "reduce_op": "sum", "root": -1, "nb_rank": 2}
        return m("DistCollective", "x", **attributes | {"groups": [4, 6], "group_size": 2} | changes)

    fused, report = fuse(boundary(all_reduce=collective))
    assert [(entry.status, entry.form, entry.tp_size) for entry in report.found] == [("full", "DistCollective", 2)]
    (node,) = (node for node in fused.graph.node if node.op_type == "MhcBoundary")
    assert next(list(each.ints) for each in node.attribute if each.name == "group") == [4, 6]
    parse(fused)
    fused, _ = fuse(boundary(all_reduce=collective), FuseOptions(rank=1))
    (node,) = (node for node in fused.graph.node if node.op_type == "MhcBoundary")
    assert next(each.i for each in node.attribute if each.name == "rank") == 1
    for changes in ({"reduce_op": "max"}, {"collective_operation": "all_gather", "reduce_op": "none"}):
        _, report = fuse(boundary(all_reduce=lambda m, changes=changes: collective(m, **changes)))
        assert report.found == ()


@pytest.mark.parametrize("exact", [True, False])
def test_weight_that_an_exporter_widened(trt, parse, exact):
    gamma = np.random.default_rng(0).standard_normal(HIDDEN).astype(np.float32)
    if exact:
        gamma = (gamma.view(np.uint32) & 0xFFFF0000).view(np.float32)
    m = onnx_forms.Model(("M",))
    streams = onnx_forms.post(m, "multiply", m.all_reduce("x"))
    collapsed = m.wide(onnx_forms.collapse(m, "multiply", streams))
    normed = m.narrow(m("RMSNormalization", collapsed, gamma, axis=-1, epsilon=1e-6))
    model = m.build({"streams": streams, "layer_input": normed})
    fused, report = fuse(model)
    if exact:
        assert report.full == 1
        compare(parse, model, fused, feeds_of(("M",)))
    else:
        assert [reason.code for reason in report.found[0].reasons] == ["dtype"]


def test_epsilon_that_is_an_input_with_a_default(trt):
    model = boundary(forms=("multiply", "multiply", "divide"))
    (eps,) = (each for each in model.graph.initializer if onnx.numpy_helper.to_array(each).dtype == np.float32)
    model.graph.input.append(helper.make_tensor_value_info(eps.name, TensorProto.FLOAT, []))
    _, report = fuse(model)
    assert [reason.code for reason in report.found[0].reasons] == ["eps_not_constant"]


def test_norm_over_more_than_the_hidden_axis(trt):
    m = onnx_forms.Model(("B", "S"))
    streams = onnx_forms.post(m, "multiply", m.all_reduce("x"))
    collapsed = m.wide(onnx_forms.collapse(m, "multiply", streams))
    normed = m.narrow(m("RMSNormalization", collapsed, m.wide("gamma"), axis=-2, epsilon=1e-6))
    _, report = fuse(m.build({"streams": streams, "layer_input": normed}))
    assert [(entry.status, entry.notes[0].code) for entry in report.found] == [("residual_only", "no_norm")]


def test_refused_boundary_stays(trt):
    model = boundary(outputs=lambda m, reduced, results: {**results, "x_sum": m("Identity", reduced)})
    fused, report = fuse(model)
    assert [reason.code for reason in report.found[0].reasons] == ["extra_consumer"]
    assert op_types(fused) == op_types(model)


def test_reader_inside_of_a_branch_counts(trt):
    def outputs(m, reduced, results):
        kind = helper.make_tensor_value_info("inner", TensorProto.BFLOAT16, None)
        branches = [
            helper.make_graph([helper.make_node(op, [reduced], ["inner"])], op, [], [kind]) for op in ("Neg", "Abs")
        ]
        branch = m("If", np.array(True), then_branch=branches[0], else_branch=branches[1])
        return {**results, "x_sum": branch}

    _, report = fuse(boundary(outputs=outputs))
    assert [reason.code for reason in report.found[0].reasons] == ["extra_consumer"]


def test_inside_of_a_function(trt, parse):
    model = boundary()
    inputs = [each.name for each in model.graph.input]
    constants = [helper.make_node("Constant", [], [each.name], value=each) for each in model.graph.initializer]
    imports = list(model.opset_import)
    outputs = [each.name for each in model.graph.output]
    function = helper.make_function("models", "Block", inputs, outputs, [*constants, *model.graph.node], imports)
    call = helper.make_node("Block", inputs, outputs, domain="models")
    graph = helper.make_graph([call], "calls", list(model.graph.input), list(model.graph.output))
    calling = helper.make_model(graph, opset_imports=[*imports, helper.make_opsetid("models", 1)], functions=[function])
    fused, report = fuse(calling)
    assert report.full == 1
    compare(parse, model, fused, feeds_of(("M",)))


# What torch exports.


@pytest.mark.parametrize("name", ["torch_einsum", "torch_bmm", "nemo_boundary"])
def test_exported_boundary(trt, parse, name):
    model = onnx.load(FILES / f"{name}.onnx")
    fused, report = fuse(model)
    assert [entry.status for entry in report.found] == ["full"]
    onnx.checker.check_model(fused)
    lead = ("B", "S") if name.startswith("nemo") else ("M",)
    wanted = {each.name for each in model.graph.input}
    feeds = [{key: value for key, value in each.items() if key in wanted} for each in feeds_of(lead)]
    compare(parse, model, fused, feeds)


def test_exported_layer(trt, parse):
    """The boundaries' coefficients are computed by nemo-automodel's own modules."""
    import ml_dtypes

    from trtllm_mhc.reference.interpreter import evaluate

    model = onnx.load(FILES / "nemo_layer.onnx")
    fused, report = fuse(model)
    assert [entry.status for entry in report.found] == ["full", "full"]
    onnx.checker.check_model(fused)
    random = np.random.default_rng(0)
    feeds = [
        {
            each.name: random.standard_normal([size.dim_value or 2 for size in each.type.tensor_type.shape.dim]).astype(
                np.float32 if each.type.tensor_type.elem_type == TensorProto.FLOAT else ml_dtypes.bfloat16
            )
            for each in model.graph.input
        }
    ] * 2
    exact = evaluate([parse(model), parse(model)], feeds, precision="float64")[0]
    before, after = (evaluate([parse(each), parse(each)], feeds)[0] for each in (model, fused))
    for name, wanted in exact.items():
        # The layer amplifies roundings, so the two forms are compared by how far they are from no roundings at all.
        errors = [np.sqrt(np.mean((got[name].astype(np.float64) - wanted) ** 2)) for got in (before, after)]
        assert 0 < errors[1] <= 1.05 * errors[0], name


# Files.


def external(folder, model, size=None):
    """Write ``model`` with one large weight in a file of its own; ``size`` bytes, all zero, if it is never read."""
    rows = (size or 2**20) // (2 * HIDDEN)
    weight = onnx.TensorProto(name="weight", data_type=TensorProto.BFLOAT16, dims=[rows, HIDDEN])
    weight.data_location = TensorProto.EXTERNAL
    for key, value in {"location": "weights.bin", "offset": "0", "length": str(2 * HIDDEN * rows)}.items():
        weight.external_data.add(key=key, value=value)
    model.graph.initializer.append(weight)
    model.graph.node.append(helper.make_node("Gather", ["weight", "row"], ["weight_row"]))
    model.graph.input.append(helper.make_tensor_value_info("row", TensorProto.INT64, []))
    model.graph.output.append(helper.make_tensor_value_info("weight_row", TensorProto.BFLOAT16, [HIDDEN]))
    folder.mkdir(exist_ok=True)
    with open(folder / "weights.bin", "wb") as file:
        if size is None:
            file.write(np.arange(rows * HIDDEN, dtype=np.uint16).tobytes())
        else:
            file.truncate(2 * HIDDEN * rows)
    (folder / "in.onnx").write_bytes(model.SerializeToString())
    return folder / "in.onnx"


def test_weights_over_two_gigabytes_stay_where_they_are(trt, tmp_path, monkeypatch):
    from trtllm_mhc.rewrite.onnx import rewrite_file

    source = external(tmp_path, boundary(), size=3 * 2**30)
    monkeypatch.setattr(ir.ExternalTensor, "numpy", lambda self: pytest.fail(f"{self.name} was read"))
    before = (tmp_path / "weights.bin").stat()
    report = rewrite_file(source, tmp_path / "out.onnx")
    assert report.full == 1
    after = (tmp_path / "weights.bin").stat()
    assert (after.st_mtime_ns, after.st_blocks) == (before.st_mtime_ns, before.st_blocks)
    assert (tmp_path / "out.onnx").stat().st_size < 2**20
    (weight,) = (
        each
        for each in onnx.load(tmp_path / "out.onnx", load_external_data=False).graph.initializer
        if each.name == "weight"
    )
    assert {each.key: each.value for each in weight.external_data}["location"] == "weights.bin"
    onnx.checker.check_model(str(tmp_path / "out.onnx"))


def test_weights_follow_into_another_folder(trt, parse, tmp_path):
    from trtllm_mhc.rewrite.onnx import rewrite_file

    source = external(tmp_path / "a", boundary())
    (tmp_path / "b").mkdir()
    target = tmp_path / "b" / "out.onnx"
    rewrite_file(source, target)
    assert sorted(each.name for each in target.parent.iterdir()) == ["out.onnx", "out.onnx.data"]
    weights = [
        next(
            onnx.numpy_helper.to_array(each).tobytes()
            for each in onnx.load(path).graph.initializer
            if each.name == "weight"
        )
        for path in (source, target)
    ]
    assert weights[0] == weights[1]
    parse(target)


def test_nothing_to_fuse_is_as_it_was_in_another_folder_too(trt, tmp_path):
    from trtllm_mhc.rewrite.onnx import rewrite_file

    model = onnx_forms.Model(("M",))
    source = external(tmp_path / "a", model.build({"streams": model("Identity", "residual")}))
    (tmp_path / "b").mkdir()
    rewrite_file(source, tmp_path / "b" / "out.onnx")
    graphs = [onnx.load(path).graph for path in (source, tmp_path / "b" / "out.onnx")]
    nodes = [[(node.op_type, list(node.input), list(node.output)) for node in graph.node] for graph in graphs]
    assert nodes[0] == nodes[1]
    assert {each.name for each in graphs[1].value_info} <= {"weight"}  # onnx-ir adds those of initializers


def test_in_place(trt, tmp_path):
    from trtllm_mhc.rewrite.onnx import rewrite_file

    path = external(tmp_path, boundary())
    assert rewrite_file(path, path).full == 1
    once = path.read_bytes()
    assert rewrite_file(path, path).already_fused == 1
    assert path.read_bytes() == once
    assert sorted(each.name for each in tmp_path.iterdir()) == ["in.onnx", "weights.bin"]


def test_nothing_to_fuse_is_copied(trt, tmp_path):
    from trtllm_mhc.rewrite.onnx import rewrite_file

    model = onnx_forms.Model(("M",)).build({"streams": "residual"})
    (tmp_path / "in.onnx").write_bytes(model.SerializeToString())
    assert rewrite_file(tmp_path / "in.onnx", tmp_path / "out.onnx").found == ()
    assert (tmp_path / "out.onnx").read_bytes() == (tmp_path / "in.onnx").read_bytes()


def test_files_that_are_no_use(trt, tmp_path):
    from trtllm_mhc.rewrite.onnx import rewrite_file

    target = tmp_path / "out.onnx"
    with pytest.raises(FileNotFoundError, match=r"nothing\.onnx"):
        rewrite_file(tmp_path / "nothing.onnx", target)
    (tmp_path / "text.onnx").write_text("no model")
    with pytest.raises(ValueError, match="expected an ONNX model"):
        rewrite_file(tmp_path / "text.onnx", target)
    (tmp_path / "old.onnx").write_bytes(boundary(opset=17).SerializeToString())
    with pytest.raises(ValueError, match="opset 18 or later, got 17"):
        rewrite_file(tmp_path / "old.onnx", target)
    source = external(tmp_path, boundary())
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"'weight' in .*weights\.bin"):
        rewrite_file(source, target)
    assert not target.exists()
