"""The report of a drill for CI systems."""

from __future__ import annotations

from xml.etree import ElementTree

from distrain.cli.drilling import _junit
from distrain.drilling.causes import Cause
from distrain.drilling.drill import DrillReport, Verdict


def test_a_report_is_xml_whatever_the_script_has_said() -> None:
    said = "does not go on: \x1b[31mValueError\x00: \ud800 <bad> & 'worse'"
    verdicts = [Verdict("kill", "failed", said, [Cause("prefix", "")]), Verdict("all", "untested", "too short")]
    report = DrillReport("a \x07 & b", 2, "step", 20, [*verdicts, Verdict("ranks", "exact", "fine")], [], 1.0)
    suite = ElementTree.fromstring(_junit(report))
    assert (suite.get("tests"), suite.get("failures")) == ("3", "1")
    assert [[child.tag for child in case] for case in suite] == [["failure"], ["skipped"], ["system-out"]]
    failure = suite[0][0]
    assert "<bad> & 'worse'" in str(failure.get("message"))
    assert "docs/drill.md#prefix" in str(failure.text)
