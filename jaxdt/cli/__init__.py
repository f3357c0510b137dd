"""What the scripts share: flags, one-line errors, exit codes."""
