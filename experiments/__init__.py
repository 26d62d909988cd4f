"""Scripts that each answer one question. Their docstrings give the command and describe what it measures."""
