"""Which replies can be used, and what a round's metrics say of them."""

import pytest
from flwr.app import ArrayRecord, MetricRecord, RecordDict

from fedfq.flower.arrays import blob
from fedfq.flower.limits import Pair
from fedfq.flower.protocol import UPDATE
from fedfq.flower.replies import RoundLedger, read, usual_kinds


def answer(node=1, **metrics):
    metrics = {"num-examples": 10, "loss": 0.5} | {name.replace("_", "-"): value for name, value in metrics.items()}
    records = {"arrays": ArrayRecord({"update": blob(bytes(20), UPDATE)}), "metrics": MetricRecord(metrics)}
    return read(node, RecordDict(records), "num-examples")


def test_a_tie_is_won_by_what_was_usual_then_by_name_and_never_by_who_was_first():
    one, other = answer(1, accuracy=0.5), answer(2, zeal=0.5)
    for answers in ([one, other], [other, one]):
        assert usual_kinds(answers, {}) == one.kinds
        assert usual_kinds(answers, {other.kinds: 1}) == other.kinds
        assert usual_kinds([*answers, answer(3, zeal=0.1)], {one.kinds: 9}) == other.kinds


@pytest.mark.parametrize("nmse", [1e300, 1.2e6, -0.1, float("nan"), float("inf"), [0.5]])
def test_an_error_that_no_payload_has_is_left_out(nmse):
    ledger = RoundLedger(1000)
    for each in (
        answer(1, fedfq_nmse=0.1),
        answer(2, fedfq_nmse=0.2),
        answer(3, fedfq_nmse=0.3),
        answer(4, fedfq_nmse=nmse),
    ):
        ledger.accept(each, each.weight)
    assert ledger.metrics(None)["fedfq-nmse"] == 0.2


def test_one_client_hardly_moves_the_rounds_error():
    ledger = RoundLedger(1000)
    for each in (answer(1, fedfq_nmse=0.1), answer(2, fedfq_nmse=0.1), answer(3, fedfq_nmse=1.0)):
        ledger.accept(each, each.weight)
    assert ledger.metrics(None)["fedfq-nmse"] == 0.1


def test_metrics_say_who_counted_for_less():
    ledger = RoundLedger(1000)
    for node, norm in ((1, 2.0), (2, 3.0), (3, 400.0)):
        each = answer(node)
        each.norms, each.scales = Pair(norm, 0.0), Pair(min(1.0, 20 / norm), 1.0)
        each.count_by(30 if node == 2 else 10)
        ledger.accept(each, 99 if node == 2 else 10)
    metrics = ledger.metrics(MetricRecord({"loss": 0.5}))
    assert (metrics["fedfq-norm-median"], metrics["fedfq-norm-largest"]) == (3.0, 400.0)
    assert metrics["fedfq-share-largest"] == 0.6
    assert (metrics["fedfq-scaled"], metrics["fedfq-scaled-nodes"]) == (1, [3])
    assert (metrics["fedfq-reweighted"], metrics["fedfq-reweighted-nodes"]) == (1, [2])
    assert metrics["fedfq-dropped"] == 0 and "fedfq-dropped-nodes" not in metrics
    assert metrics["loss"] == 0.5


def test_a_client_cannot_write_lines_of_the_log():
    ledger = RoundLedger(1000)
    ledger.drop(1, "metrics", "it has a\n2026-01-01 all is well\x1b[2J")
    ledger.add_failure(2, "oops\nfake")
    assert [reason for _, reason in ledger.arrivals(1).dropped] == [
        "metrics: it has a?2026-01-01 all is well?[2J",
        "oops?fake",
    ]
