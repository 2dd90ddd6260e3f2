"""Flower's deployment behind shaped links, for real: a SuperLink, two SuperNodes, a few rounds, and nothing left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedfq.codec.ratio import DOWN_RATIO
from fedfq.network.deployment import PORT, deployed
from fedfq.network.links import inside, network
from fedfq.network.measure import RATIO, STEPS, NetworkCell, measure
from tests.network.test_links import LISTEN, alive, heed_signals, needs_root, shown

pytestmark = needs_root

RAW = 4 * 271_117


def left_behind() -> list[str]:
    return [line for line in shown("ip", "netns", "list").splitlines() if line.startswith(f"fq{os.getpid()}-")]


@pytest.mark.slow
def test_rounds_through_shaped_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    lines = measure(NetworkCell("access", 2, "fedfq", rounds=1, step_seconds=0.05))
    assert [line["round"] for line in lines] == [2]  # the first one does not count
    (line,) = lines
    assert line["round_s"] > STEPS * 0.05
    for way, ratio in (("uplink", RATIO), ("downlink", DOWN_RATIO)):
        assert 2 * 0.9 * RAW / ratio < line[f"{way}_bytes"] < 2 * RAW / 10
    assert line["payload_bytes"] + line["down_payload_bytes"] < 2 * RAW * (1 / RATIO + 1 / DOWN_RATIO)
    assert line["encode_s"] > 0
    assert left_behind() == [] and list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_an_app_that_fails_ends_with_its_reason_and_leaves_nothing_behind() -> None:
    with (
        pytest.raises(RuntimeError, match="could not convert string to float"),
        network(1, 33, 330) as net,
        deployed(net) as deployment,
    ):
        config = {"variant": "one-parameter", "rounds": 1, "steps": 1, "step-seconds": "soon", "slow-motion": 1.0}
        deployment.run(config)
    assert left_behind() == []


def test_a_port_in_use_is_refused_before_anything_is_started() -> None:
    with network(1, 33, 330) as net:
        process = subprocess.Popen(
            inside(net.server, [sys.executable, "-c", LISTEN.format(port=PORT)]), stdout=subprocess.PIPE
        )
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        with pytest.raises(ValueError, match=f"port {PORT} is in use"), deployed(net):
            pass
        assert shown("ip", "netns", "pids", net.server).split() == [str(process.pid)]
    assert process.wait(10) == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_command_and_all_that_it_started(kind: signal.Signals, code: int, tmp_path: Path) -> None:
    out, temporary = tmp_path / "out", tmp_path / "temporary"
    temporary.mkdir()
    command = ["-c", "from fedfq.cli import main; main()", "reproduce", "table4", "--clients", "2", "--out", str(out)]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    process = subprocess.Popen([sys.executable, *command], env=environment, preexec_fn=heed_signals)
    namespace = f"fq{process.pid}-client1"
    pids: list[str] = []
    deadline = time.monotonic() + 120
    while len(pids) < 2 and time.monotonic() < deadline:  # a SuperNode, and what it starts
        time.sleep(0.2)
        if namespace in shown("ip", "netns", "list"):
            pids = shown("ip", "netns", "pids", namespace).split()
    pids += shown("ip", "netns", "pids", f"fq{process.pid}-server").split()
    assert len(pids) > 2
    process.send_signal(kind)
    assert process.wait(60) == code
    assert f"fq{process.pid}-" not in shown("ip", "netns", "list")
    assert not any(Path("/proc", pid).exists() and alive(pid) for pid in pids)
    assert list(temporary.iterdir()) == [] and not out.exists()
