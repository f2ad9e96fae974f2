# SPDX-License-Identifier: Apache-2.0
"""The place where two forms part, on made-up tensors."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

Array = npt.NDArray[Any]
RANKS, ROWS, WIDTH = 2, 4, 256
NAMES = ("first", "second", "third")


@pytest.fixture
def locate(trt: Any) -> Any:
    from trtllm_mhc.verification import locate

    return locate


def forms() -> tuple[list[dict[str, Array]], list[dict[str, Array]], list[dict[str, Array]]]:
    """Three tensors on each rank: both forms as if rounded differently, and the exact ones."""
    rng = np.random.default_rng(11)
    exact = [{name: rng.standard_normal((ROWS, WIDTH)) for name in NAMES} for _ in range(RANKS)]

    def rounded() -> list[dict[str, Array]]:
        return [
            {name: (array * (1 + 1e-3 * rng.standard_normal(array.shape))).astype(ml_dtypes.bfloat16)}
            | {other: rank[other].astype(ml_dtypes.bfloat16) for other in NAMES if other != name}
            for rank in exact
            for name, array in [("third", rank["third"])]
        ]

    return rounded(), rounded(), exact


def points(locate: Any) -> list[Any]:
    return [locate.Point(f"tensor {name}", name, name) for name in NAMES]


def test_right_forms_have_no_deviation(locate: Any) -> None:
    assert locate.first_deviation(points(locate), *forms()) is None


@pytest.mark.parametrize("form", ["fused", "unfused"])
def test_first_tensor_rank_and_row_are_named(locate: Any, form: str) -> None:
    fused, unfused, exact = forms()
    wrong = fused if form == "fused" else unfused
    wrong[1]["second"][2] *= ml_dtypes.bfloat16(1.25)
    for rank in wrong:  # and everything after it
        rank["third"] *= ml_dtypes.bfloat16(2)
    found = locate.first_deviation(points(locate), fused, unfused, exact)
    assert (found.point.name, found.form, found.ranks, found.rows) == ("tensor second", form, (1,), (2,))
    assert (found.rank, found.row) == (1, 2)
    assert found.error == pytest.approx(0.25, rel=0.05)
    assert found.usual < 0.01
    assert str(found).startswith(f"{form}: tensor second is off on rank 1 in row 2; most on rank 1 in row 2, by 2.")


def test_one_element_is_enough(locate: Any) -> None:
    fused, unfused, exact = forms()
    fused[0]["first"][3, 17] += ml_dtypes.bfloat16(0.5)
    found = locate.first_deviation(points(locate), fused, unfused, exact)
    assert (found.point.name, found.ranks, found.rows) == ("tensor first", (0,), (3,))


def test_nan_is_off(locate: Any) -> None:
    fused, unfused, exact = forms()
    fused[1]["second"][0, 0] = ml_dtypes.bfloat16(float("nan"))
    found = locate.first_deviation(points(locate), fused, unfused, exact)
    assert (found.point.name, found.form, found.rank, found.row) == ("tensor second", "fused", 1, 0)


def test_rounding_noise_is_not_off(locate: Any) -> None:
    """A form that is exactly right does not make the other's rounding an error."""
    fused, _, exact = forms()
    assert locate.first_deviation(points(locate), fused, exact, exact) is None


def test_an_error_of_both_is_nobody_s(locate: Any) -> None:
    """The exact evaluation is of the unfused network: what both have, the network has."""
    fused, unfused, exact = forms()
    for rank in (*fused, *unfused):
        rank["first"] *= ml_dtypes.bfloat16(1.5)
    assert locate.first_deviation(points(locate), fused, unfused, exact) is None


def test_unfused_probes_are_the_fused_ones_tensors(trt: Any, builder: Any) -> None:
    from trtllm_mhc.models.deepseek_v41 import DeepseekV41Config, ModelWeights
    from trtllm_mhc.runtime.build import make_network
    from trtllm_mhc.verification.boundary_stack import StackJobs
    from trtllm_mhc.verification.locate import boundary_points
    from trtllm_mhc.verification.probes import probe_unfused

    config = DeepseekV41Config(num_hidden_layers=2)
    jobs = StackJobs(config, ModelWeights(config), 2, "none")
    networks = {}
    for job in (jobs.fused(), jobs.probed(), jobs.probed_unfused()):
        networks[job.name] = make_network(builder)
        job.populate(networks[job.name], 0)
    found = boundary_points(jobs.probes, jobs.unfused_probes)
    assert [point.name for point in found] == [
        f"{role} of boundary {index} (mhc_boundary_{index})"
        for index in range(4)
        for role in (("x", "residual_out", "layer_input") if index in (0, 2) else ("x", "residual_out"))
    ]
    shown = {
        name: {network.get_output(index).name for index in range(network.num_outputs)}
        for name, network in networks.items()
    }
    assert {point.unfused for point in found} <= shown[jobs.probed_unfused().name]
    assert {point.fused for point in found} <= shown[jobs.probed().name]
    with pytest.raises(LookupError, match="the network has no"):
        probe_unfused(make_network(builder), jobs.reports[0])
