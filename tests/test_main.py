"""`python -m pnkrylov`: the report, and that a broken installation does not pass its self-check."""

import dataclasses

import pytest

import pnkrylov as pk
from pnkrylov.__main__ import main


@pytest.mark.one_precision
def test_the_report_names_what_matters_and_passes(capsys):
    assert main() == 0
    report = capsys.readouterr().out
    for wanted in (pk.__version__, "jaxlib", "devices", "dtype", "passed"):
        assert wanted in report


@pytest.mark.one_precision
def test_a_wrong_mean_fails_the_self_check(monkeypatch, capsys):
    solve = pk.solve

    def wrong(*arguments, **options):
        belief = solve(*arguments, **options)
        return dataclasses.replace(belief, mean_flat=1.1 * belief.mean_flat)

    monkeypatch.setattr(pk, "solve", wrong)
    assert main() == 1
    assert "FAILED   solve: error" in capsys.readouterr().out
