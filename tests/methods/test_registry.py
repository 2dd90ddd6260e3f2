"""Methods by name: what there is, what they take, and what is said about what they do not take."""

import pytest

from fedfq.methods import METHODS, make, meanings_of, options_of, parse
from fedfq.methods.method import Method


def test_all_names_are_there():
    expected = {
        *("fedavg", "fedavg-2bit", "fedavg-4bit", "fedavg-8bit", "fedpaq", "aqg", "acsgd", "acsgd-topk"),
        *("fedfq-cgsa", "fedfq-exact", "fedfq", "topk", "stc", "signsgd", "eden", "qsgd", "dadaquant"),
    }
    assert set(METHODS) == expected


@pytest.mark.parametrize("name", METHODS)
def test_every_method_says_what_it_is(name: str):
    made = make(name)
    assert isinstance(made, Method)
    for text in (made.summary, made.paper, made.claims, made.client_memory, made.server_memory):
        assert text
    assert all(getattr(made, option) == default for option, default in options_of(name).items() if default is not None)
    assert meanings_of(name).keys() == options_of(name).keys()
    assert all(values and meaning for values, meaning in meanings_of(name).values())


def test_names_with_options():
    assert parse("eden@64") == ("eden", {"ratio": 64})
    assert parse("stc:sparsity=0.01:error-feedback=false") == ("stc", {"sparsity": 0.01, "error_feedback": False})
    assert make(*parse("fedpaq")[:1], **parse("fedpaq:norm=max")[1]).norm == "max"
    with pytest.raises(ValueError, match="expected option=value"):
        parse("eden:ratio")


def test_an_option_is_given_once():
    assert parse("fedfq@64", {"gain": True}) == ("fedfq", {"ratio": 64, "gain": True})
    with pytest.raises(ValueError, match="ratio is given twice: in 'fedfq@64', and as 128 beside it"):
        parse("fedfq@64", {"ratio": 128})
    for text in ("fedfq@64:ratio=64", "fedfq:gain=true:gain=false", "stc:error-feedback=true:error_feedback=true"):
        with pytest.raises(ValueError, match="is given twice"):
            parse(text)


def test_what_is_unknown_is_refused_with_a_hint():
    with pytest.raises(ValueError, match="did you mean 'eden'"):
        make("edem")
    with pytest.raises(ValueError, match="did you mean 'sparsity'"):
        make("stc", sparsty=0.1)
    with pytest.raises(ValueError, match="it has none"):
        make("fedavg", ratio=3)
    with pytest.raises(ValueError, match="no option 'bits'"):
        make("fedavg-2bit", bits=4)
