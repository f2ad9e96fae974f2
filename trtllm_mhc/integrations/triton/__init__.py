# SPDX-License-Identifier: Apache-2.0
"""Serving tensor-parallel engines with Triton Inference Server.

- `repository` writes model repositories and launch lines.
- `model` is the python-backend model. It drives a `groups.RankGroup`, all ranks of one group, through a
  `runner.GroupRunner`.
- `client` has requests, the canary and the reload of a model that no longer answers; `load` measures latencies.
- `server` starts a tritonserver on loopback, for tests and examples.

docs/triton.md is the user's page.
"""
