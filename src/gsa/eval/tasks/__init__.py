"""Task definitions: from a name to tasks that lm-evaluation-harness can run, with their documents."""
