# SPDX-License-Identifier: Apache-2.0
"""The report's forms: counts, JSON, table and exit code."""

import json

import pytest


@pytest.fixture
def report(trt):
    from trtllm_mhc.rewrite import BoundaryEntry, Reason, Report

    def entry(k, status, reasons=(), notes=()):
        return BoundaryEntry(
            name=f"mhc_boundary_{k}",
            status=status,
            all_reduce=f"all_reduce_{k}",
            form="MhcAllReduce",
            streams=f"streams_{k}",
            layer_input=f"input_{k}" if status == "full" else None,
            hidden=5120,
            hc=4,
            tp_size=2,
            reasons=reasons,
            notes=notes,
        )

    reason = Reason("network_output", "'sum' is an output of the network.", "Do not mark it.")
    note = Reason("no_norm", "The collapse is followed by no RMSNorm.", "")
    entries = [entry(k, "full") for k in range(3)]
    return Report((*entries, entry(3, "refused", (reason,)), entry(4, "residual_only", notes=(note,))), ("embed",), 7)


def test_counts(report):
    assert (report.full, report.residual_only, len(report.fused), len(report.refused)) == (3, 1, 4, 1)


def test_json_holds_everything(report):
    data = json.loads(report.to_json())
    assert data["boundaries_found"] == 5
    assert (data["boundaries_fused"], data["boundaries_full"], data["boundaries_residual_only"]) == (4, 3, 1)
    assert data["boundaries_refused"] == 1
    assert (data["format"], data["already_fused"], data["other_all_reduces"]) == (1, 7, ["embed"])
    assert [entry["name"] for entry in data["found"]] == [f"mhc_boundary_{k}" for k in range(5)]
    assert data["found"][3]["reasons"] == [
        {"code": "network_output", "what": "'sum' is an output of the network.", "remedy": "Do not mark it."}
    ]


def test_table_joins_equal_boundaries_and_says_why(report):
    text = report.to_text(width=200)
    assert text.splitlines()[0].strip() == (
        "4 of 5 boundaries fused (3 full, 1 residual-only), 7 fused before; 1 all-reduce layers belong to no boundary"
    )
    assert "mhc_boundary_0 .. mhc_boundary_2 (3)" in text
    assert "'sum' is an output of the network. Do not mark it." in text
    assert "followed by no RMSNorm" in text
    assert "4 x 5120, tp 2" in text


@pytest.mark.parametrize(("require", "code"), [(None, 1), (4, 0), (11, 0), (12, 1)])
def test_exit_code(report, require, code):
    assert report.exit_code(require) == code


def test_options_are_checked(trt):
    from trtllm_mhc.rewrite import FuseOptions

    for options in (
        {"tp_size": 3},
        {"tp_size": 2, "group": (0, 1, 2)},
        {"group": (1, 1)},
        {"rank": -2},
        {"tp_size": 2, "rank": 2},
        {"unlabelled_collectives": "sum"},
        {"separate_collapse": "yes"},
    ):
        with pytest.raises(ValueError, match=r"FuseOptions: \w+: expected .*, got "):
            FuseOptions(**options)


def test_neighbourhood_of_a_boundary(trt, network):
    import rewrite_forms

    from trtllm_mhc.rewrite import fuse_boundaries, neighbourhood_dot

    rewrite_forms.write_boundary(network, rewrite_forms.Form())
    entry = fuse_boundaries(network).found[0]
    text = neighbourhood_dot(network, entry.name, radius=1)
    assert text.startswith("digraph")
    assert text.count("{") == text.count("}") == 1
    assert 'label="PLUGIN_V3\\nmhc_boundary_0", style=bold' in text
    assert '"residual" [shape=ellipse];' in text
    assert '"streams" [shape=ellipse, peripheries=2];' in text
    replaced = neighbourhood_dot(network, entry.all_reduce, radius=1)
    assert "style=dashed" in replaced
    assert "mhc_boundary_0" not in replaced
    assert len(neighbourhood_dot(network, entry.all_reduce, radius=2)) > len(replaced)
    with pytest.raises(ValueError, match="expected the name of a layer"):
        neighbourhood_dot(network, "no such layer")
