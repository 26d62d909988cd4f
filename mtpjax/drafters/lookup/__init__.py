"""The prompt lookup method, which copies drafts from the row's text."""
