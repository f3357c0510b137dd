"""The vocabulary of the machines: events, messages, ledger, schedules, trace. No policy."""
