"""One script per question, each with its command and a description of what it measures."""
