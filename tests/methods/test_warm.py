"""After the warm-up, no round waits for a kernel to be compiled, or to be loaded."""

import json
import subprocess
import sys

import numpy as np

from fedfq.methods import METHODS, make
from fedfq.methods.warm import warm_up

LIKE = {
    "conv.weight": np.zeros((16, 8, 3, 3), np.float32),
    "bn.running_var": np.ones(16, np.float32),
    "bn.num_batches_tracked": np.array(0),
    "fc.weight": np.zeros((120, 90), np.float32),
    "fc.bias": np.zeros(120, np.float32),
}
# Every method in a process of its own, as kernels that one has loaded are there for the next one.
WATCHED = """
import json, os, sys, tempfile
from pathlib import Path
import numpy as np
from fedfq.codec.cache import KernelCache
from fedfq.federation.memory import Memories
from fedfq.methods import Order, make
from fedfq.methods.warm import warm_up
from tests.methods.test_warm import LIKE

def asked_for(name, is_warm):
    asked, load = [], KernelCache.load_overload
    method = make(name)
    if is_warm:
        warm_up(method, LIKE)
    KernelCache.load_overload = lambda self, *rest: asked.append(self._name) or load(self, *rest)
    server, model, memories, written = method.server(LIKE), LIKE, Memories(Path(tempfile.mkdtemp())), None
    rng = np.random.default_rng(1)
    for round_ in (1, 2):
        context = method.open_round(round_, model, LIKE)
        server.open_round(context)
        announcement = server.announce({5: 2.0}).get(5, b"")
        update = {n: np.asarray(rng.laplace(0, 0.1, v.shape)).astype(v.dtype) for n, v in LIKE.items()}
        memory = memories.read(5, written)
        upload = method.encode(update, memory, Order(context, 5, 9, announcement))
        memories.write(5, round_, upload.memory)
        written = round_ if upload.memory else None
        server.receive(5, upload.payload, 2.0)
        model = {n: model[n] + change for n, change in server.finish(0.5).items()}
    return asked

for name in sys.argv[2:]:
    if (child := os.fork()) == 0:
        print(json.dumps([name, asked_for(name, sys.argv[1] == "warm")]), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


def asked_for(warm, names):
    process = subprocess.run([sys.executable, "-c", WATCHED, warm, *names], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return dict(map(json.loads, process.stdout.splitlines()))


def test_no_method_asks_for_a_kernel_afterwards():
    assert asked_for("warm", METHODS) == {name: [] for name in METHODS}
    assert all(asked_for("cold", ["fedfq", "eden"]).values())


def test_the_model_stays_what_it_was():
    before = {name: value.copy() for name, value in LIKE.items()}
    warm_up(make("fedfq"), LIKE)
    assert all(np.array_equal(LIKE[name], before[name]) for name in LIKE)
