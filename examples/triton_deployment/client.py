# SPDX-License-Identifier: Apache-2.0
"""Sends requests to a server that deploy.py's repository has been given to, with plain tritonclient.

client.py [--protocol grpc] [--url 127.0.0.1:8001] [--rows 4] [--requests 3]
"""

from __future__ import annotations

import argparse
import time

import ml_dtypes
import numpy as np
import tritonclient.grpc
import tritonclient.http

MODEL, INPUT, OUTPUT = "boundary_stack", "embeddings", "hidden_states"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--protocol", choices=["http", "grpc"], default="http")
    parser.add_argument("--url", help="address:port; default: Triton's ports on this machine")
    parser.add_argument("--rows", type=int, default=4, help="tokens in a request")
    parser.add_argument("--requests", type=int, default=3)
    arguments = parser.parse_args()

    module = tritonclient.http if arguments.protocol == "http" else tritonclient.grpc
    url = arguments.url or ("127.0.0.1:8000" if arguments.protocol == "http" else "127.0.0.1:8001")
    # HTTP bounds a request when the client is made, gRPC when the request is.
    bounds = {"network_timeout": 30.0} if arguments.protocol == "http" else {}
    per_request = {} if arguments.protocol == "http" else {"client_timeout": 30.0}
    client = module.InferenceServerClient(url, **bounds)

    metadata = client.get_model_config(MODEL)
    config = metadata if arguments.protocol == "http" else metadata.config
    described = config["input"][0]["dims"] if arguments.protocol == "http" else config.input[0].dims
    hidden = int(described[1])

    rng = np.random.default_rng()
    for _ in range(arguments.requests):
        embeddings = rng.standard_normal((arguments.rows, hidden), np.float32).astype(ml_dtypes.bfloat16)
        tensor = module.InferInput(INPUT, list(embeddings.shape), "BF16")
        tensor.set_data_from_numpy(embeddings)
        begin = time.perf_counter()
        # `timeout`, in microseconds: how late the model may begin with it.
        answer = client.infer(MODEL, [tensor], timeout=5_000_000, **per_request)
        milliseconds = 1000 * (time.perf_counter() - begin)
        states = answer.as_numpy(OUTPUT)
        rms = float(np.sqrt(np.mean(np.square(states.astype(np.float64)))))
        print(f"{states.dtype} {list(states.shape)}, root mean square {rms:.4f}, {milliseconds:.2f} ms")
    client.close()


if __name__ == "__main__":
    main()
