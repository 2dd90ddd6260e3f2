"""A reproduction of seconds: two columns of digits, and folders of runs written by hand."""

from dataclasses import asdict
from pathlib import Path

from fedfq.federation.config import Config
from fedfq.reproduce.cells import Cell, Column
from tests.report.folders import a_line, write_run

SMALL = {"task": "digits", "rounds": 2, "clients": 6, "per_round": 2, "local_steps": 1, "checkpoint_every": 1}
ROWS = ("fedavg", "fedavg-2bit", "fedpaq", "fedfq@128", "fedfq")
METHODS = ("fedavg", "fedavg-2bit", "fedpaq", "fedfq@128", "fedfq@512")

TABLE_ROWS = {
    "table1": (
        *("fedavg", "fedavg-2bit", "fedavg-4bit", "fedavg-8bit", "fedfq-cgsa:claimed_ratio=32"),
        *("fedfq@64", "fedfq@128", "fedfq@256", "fedfq@512", "fedfq@1024"),
    ),
    "table2": ("fedavg", "fedpaq", "aqg", "acsgd-topk", "fedfq-cgsa:claimed_ratio=32", "fedfq", "stc", "eden@1024"),
}

IID = Column(
    *("digits-iid", "Digits, IID", SMALL | {"split": "iid"}, "fedfq@512"),
    aim=250,
    rows=ROWS,
    table_rows=TABLE_ROWS,
    paper_accuracy={"fedavg": 77.78},
    paper_target=0.75,
    paper_mb={"fedavg": 416.34},
)
SHARDS = Column(
    *("digits-shards", "Digits, shards", SMALL | {"split": "shards:2"}, "fedfq@1024"),
    rows=("fedavg", "fedavg-2bit"),
    table_rows=TABLE_ROWS,
    paper_accuracy={"fedavg": 51.19},
)
COLUMNS = (IID, SHARDS)


def write_cell(
    out: Path, column: Column, method: str, accuracies: list[float], uplink: int = 2**20, seed: int = 0
) -> Config:
    """The folder of a finished run with these accuracies, and so many bytes from all clients per round."""
    cell = Cell(column, method, seed)
    write_run(cell.folder(out), [a_line(n, a, uplink) for n, a in enumerate(accuracies, 1)], **asdict(cell.config))
    return cell.config
