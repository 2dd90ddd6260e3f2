"""Run folders written by hand, small and quick."""

import json
from dataclasses import asdict

import numpy as np

import fedfq
from fedfq.federation.config import Config
from fedfq.files import write_tensors

HOSTILE = "</td></script><script>document.title='owned'</script><img src=http://example.invalid/x onerror=alert(1)>"
ENVIRONMENT = {"fedfq": "0.1.0", "python": "3.11.0", "machine": "toaster, 2 cores"}
CLIENTS = 5


def a_model():
    rng = np.random.default_rng(0)
    return {"fc.weight": rng.normal(size=(40, 30)).astype(np.float32), "fc.bias": np.ones(40, np.float32)}


RAW = 4 * (40 * 30 + 40)


def a_line(number, accuracy, uplink=1000, rejected=(), **others):
    return {
        "round": number,
        "accuracy": accuracy,
        "loss": None if accuracy is None else 1 - accuracy,
        "clients": list(range(CLIENTS)),
        "uplink_bytes": uplink,
        "downlink_bytes": CLIENTS * RAW,
        "claimed_bits": 8 * uplink / 2,
        "rejected": [{"client": client, "reason": reason} for client, reason in rejected],
        **others,
    }


def write_run(path, lines, *, finished=True, sample=None, **config):
    """A folder with these lines; `finished` writes the model that a run ends with."""
    config = {"task": "digits", "method": "fedavg", "rounds": len(lines), "per_round": CLIENTS, **config}
    path.mkdir(parents=True)
    described = {"config": asdict(Config.make(**config)), "raw_bytes": RAW, **ENVIRONMENT}
    (path / "run.json").write_text(json.dumps(described))
    (path / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    timings = [{"round": line["round"], "train_s": 2.0, "encode_s": 0.5, "round_s": 3.0} for line in lines]
    (path / "timings.jsonl").write_text("".join(json.dumps(line) + "\n" for line in timings))
    if finished:
        write_tensors(path / "model.safetensors", a_model())
    if sample is not None:
        (path / "sample.fedfq").write_bytes(sample)
    return path


def a_payload():
    return fedfq.encode(a_model(), ratio=8, layout="digest")


def write_two(folder):
    """What `fedfq compare` leaves: FedAvg, and FedFQ with a hostile client."""
    rejected = [(3, HOSTILE)]
    write_run(folder / "fedavg", [a_line(n, 0.1 * n, CLIENTS * RAW) for n in range(1, 10)])
    lines = [a_line(n, 0.1 * n - 0.05, 3000, rejected if n == 4 else ()) for n in range(1, 10)]
    write_run(folder / "fedfq@8", lines, method="fedfq@8", sample=a_payload())
    return folder
