"""NNCodec (ISO/IEC 15938-17) on one update. Run by the Python of an environment that has it, which need not have fedfq:

    python nncodec_peer.py UPDATE.npz QP [QP ...]      prints one JSON line a quantisation parameter

NNCodec has no byte budget: its parameter is tried at several values. All else is its default.
"""

import contextlib
import io
import json
import os
import sys
import tempfile
import time

import numpy as np


def measure(update, qp):  # no annotations: this file knows nothing of the project's types
    from nncodec import nn

    copies = {name: array.copy() for name, array in update.items()}
    start = time.perf_counter()
    stream = nn.encode(copies, {"qp": qp, "verbose": False})
    encoded = time.perf_counter()
    decoded = nn.decode(stream)
    end = time.perf_counter()
    error = energy = 0.0
    for name, array in update.items():
        back = np.asarray(decoded[name], np.float64).reshape(array.shape)
        error += float(np.square(array - back).sum())
        energy += float(np.square(array, dtype=np.float64).sum())
    return {
        "qp": qp,
        "bytes": len(stream),
        "nmse": error / energy,
        "encode_s": encoded - start,
        "decode_s": end - encoded,
    }


def main():
    update = dict(np.load(sys.argv[1], allow_pickle=False))
    os.chdir(tempfile.mkdtemp())  # it writes its streams into the working directory
    for qp in sys.argv[2:]:
        with contextlib.redirect_stdout(io.StringIO()):
            result = measure(update, int(qp))
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
