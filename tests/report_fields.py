"""The reports of a simulation as plain data, which a test compares with literals."""

from jaxdt.protocol.reports import SCHEMAS


def report_fields(outcome, kind):
    """The fields of all reports of a kind, in order of time."""
    return [report.fields for report in outcome.of(SCHEMAS[kind])]
