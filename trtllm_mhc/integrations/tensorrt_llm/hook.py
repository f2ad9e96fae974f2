# SPDX-License-Identifier: Apache-2.0
"""Running the pass at the end of a model's ``forward``: the whole network is there, and no engine yet."""

from __future__ import annotations

import functools
from typing import Any, TypeVar

import tensorrt as trt
import tensorrt_llm
from tensorrt_llm import default_net
from tensorrt_llm.logger import logger

from trtllm_mhc.integrations.build_settings import BuildSettings, write_record
from trtllm_mhc.integrations.tensorrt_llm.fuse import fuse_network
from trtllm_mhc.rewrite import Report

_MARK = "_trtllm_mhc_fuses_on_build"
_Class = TypeVar("_Class", bound=type)


class FusionError(RuntimeError):
    """Fewer boundaries were fused than the build requires."""


def fuse_on_build(model_class: _Class) -> _Class:
    """Class decorator: after ``forward`` the network's boundaries are fused, and a report is logged.

    For a model class that `trtllm-build` builds (``config.mapping`` and marked outputs are what it needs)::

        @fuse_on_build
        class MyModelForCausalLM(PretrainedModel):
            ...

    Of a class and its subclasses that are all decorated, the pass runs once, after the last one's ``forward``. Put the
    class into an importable module and re-export it from the ``--model_cls_file``: worker processes import it by name.

    Raises (when a network is made):
        FusionError: fewer boundaries were fused than `trtllm-mhc trtllm-build --require` asks for.
    """
    if _MARK in vars(model_class):
        return model_class
    forward = model_class.forward  # type: ignore[attr-defined]

    @functools.wraps(forward)
    def fused_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = forward(self, *args, **kwargs)
        outermost = next(each for each in type(self).__mro__ if _MARK in vars(each))
        if outermost is model_class:
            _fuse_model(self)
        return result

    model_class.forward = fused_forward  # type: ignore[attr-defined]
    setattr(model_class, _MARK, True)
    return model_class


def _fuse_model(model: Any) -> None:
    settings = BuildSettings.from_environment()
    mapping = model.config.mapping
    report = fuse_network(default_net(), mapping, model) if settings.fuse else None
    _log(mapping.rank, report)
    if settings.folder is not None:
        record = {
            "run": settings.run,
            "rank": mapping.rank,
            "tp_size": mapping.tp_size,
            "tensorrt": trt.__version__,
            "tensorrt_llm": tensorrt_llm.__version__,
            "fuse": settings.fuse,
            "report": None if report is None else report.to_dict(),
        }
        write_record(settings.folder, mapping.rank, record)
    if report is not None and settings.require is not None and report.exit_code(settings.require):
        raise FusionError(
            f"rank {mapping.rank}: expected {settings.require} fused boundaries, got {report.summary()}\n"
            f"{report.to_text()}"
        )


def _log(rank: int, report: Report | None) -> None:
    if report is None:
        logger.info(f"[trtllm-mhc] rank {rank}: boundaries stay unfused, as asked")
        return
    say = logger.warning if report.refused or not report.found else logger.info
    say(f"[trtllm-mhc] rank {rank}:\n{report.to_text()}")
