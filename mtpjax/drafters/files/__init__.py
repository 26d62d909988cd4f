"""Reads and writes the files of published drafters: the parts that all methods share."""
