"""One script per question, each with its command and what it measured."""
